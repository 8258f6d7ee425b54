#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpusock::fuzzing::handshake(bytes));
