//! Sizes and counts in errors and in the output of the commands.

const UNITS: [(u32, &str); 6] = [(60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];

/// A size in the largest unit with at most one decimal (`2 MiB`, `1.5 GiB`), or as an integer below 10,000 of a smaller unit (`1025 MiB`).
/// If neither is exact, rounded down with the exact number: `976.5 KiB (1000000 bytes)`.
pub fn bytes(size: u64) -> String {
    if let Some(text) = exact(size) {
        return text;
    }
    match size {
        0..1024 => rounded(size),
        _ => format!("{} ({size} bytes)", rounded(size)),
    }
}

/// As [`bytes`], without the exact number.
pub fn about(size: u64) -> String {
    exact(size).unwrap_or_else(|| rounded(size))
}

/// The exact text, if there is one: at most one decimal, or an integer of a smaller unit.
fn exact(size: u64) -> Option<String> {
    let largest = UNITS.into_iter().find(|(shift, _)| size >= 1 << shift)?;
    if (u128::from(size) * 10).is_multiple_of(1 << largest.0) {
        return Some(rounded(size));
    }
    let exact = UNITS.into_iter().find(|(shift, _)| size.is_multiple_of(1 << shift));
    exact.filter(|(shift, _)| size >> shift < 10_000).map(|(shift, unit)| format!("{} {unit}", size >> shift))
}

fn rounded(size: u64) -> String {
    let Some((shift, unit)) = UNITS.into_iter().find(|(shift, _)| size >= 1 << shift) else {
        return if size == 1 { "1 byte".to_owned() } else { format!("{size} bytes") };
    };
    // Ten times any size fits in 128 bits.
    let tenths = (u128::from(size) * 10) >> shift;
    match tenths % 10 {
        0 => format!("{} {unit}", tenths / 10),
        tenth => format!("{}.{tenth} {unit}", tenths / 10),
    }
}

/// A number and its noun.
pub fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact_or_rounded_down() {
        for (size, exact, short) in [
            (0, "0 bytes", "0 bytes"),
            (1, "1 byte", "1 byte"),
            (1023, "1023 bytes", "1023 bytes"),
            (1024, "1 KiB", "1 KiB"),
            (1_000_000, "976.5 KiB (1000000 bytes)", "976.5 KiB"),
            (2 << 20, "2 MiB", "2 MiB"),
            (3 << 29, "1.5 GiB", "1.5 GiB"),
            (1025 << 20, "1025 MiB", "1025 MiB"),
            ((1 << 30) + 1, "1 GiB (1073741825 bytes)", "1 GiB"),
            (u64::MAX, "15.9 EiB (18446744073709551615 bytes)", "15.9 EiB"),
        ] {
            assert_eq!((bytes(size).as_str(), about(size).as_str()), (exact, short));
        }
    }
}
