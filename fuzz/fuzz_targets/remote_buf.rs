#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpusock::fuzzing::remote_buf(bytes));
