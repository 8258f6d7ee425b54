//! Sizes as people write them.

/// Reads `8`, `64K`, `1M`, `5G`: bytes, in powers of 1024.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size; write bytes, or for example 64K, 1M, 5G");
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// The shortest form that `parse` reads back.
pub(crate) fn show(bytes: u64) -> String {
    for (shift, unit) in [(30, "G"), (20, "M"), (10, "K")] {
        if bytes >= 1 << shift && bytes % (1 << shift) == 0 {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_survive() {
        for (text, bytes) in [("0", 0), ("8", 8), ("64K", 65_536), ("1M", 1 << 20), ("5G", 5 << 30)] {
            assert_eq!(parse(text), Ok(bytes));
            assert_eq!(show(bytes), text);
        }
        for wrong in ["", "K", "-1", "1.5M", "64KB", "99999999999G", "é"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
