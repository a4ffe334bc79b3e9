//! Sizes and durations for people. JSON has the exact numbers.

use std::time::Duration;

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

/// A duration with at most three digits: `54 us`, `1.25 ms`, `113 ms`, `4.1 s`, `2 min 5 s`.
pub fn time(time: Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    match us {
        _ if us < 999.5 => format!("{us:.0} us"),
        _ if us < 9_995.0 => format!("{:.2} ms", us / 1e3),
        _ if us < 99_950.0 => format!("{:.1} ms", us / 1e3),
        _ if us < 999_500.0 => format!("{:.0} ms", us / 1e3),
        _ if us < 9_995_000.0 => format!("{:.2} s", us / 1e6),
        _ if us < 119_950_000.0 => format!("{:.1} s", us / 1e6),
        _ => {
            let seconds = time.as_secs();
            format!("{} min {} s", seconds / 60, seconds % 60)
        }
    }
}

/// A time limit without decimals: `500 ms`, `90 s`, `2 min`.
pub fn limit(time: Duration) -> String {
    match time.as_millis() {
        ms if ms.is_multiple_of(60_000) => format!("{} min", ms / 60_000),
        ms if ms.is_multiple_of(1000) => format!("{} s", ms / 1000),
        ms => format!("{ms} ms"),
    }
}

/// A duration in microseconds, as [`time`].
pub fn micros(us: u64) -> String {
    time(Duration::from_micros(us))
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

    #[test]
    fn limits_have_the_largest_unit() {
        for (ms, text) in [(500, "500 ms"), (1500, "1500 ms"), (90_000, "90 s"), (120_000, "2 min")] {
            assert_eq!(limit(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn durations_have_three_digits() {
        for (us, text) in [
            (0, "0 us"),
            (54, "54 us"),
            (999, "999 us"),
            (1_000, "1.00 ms"),
            (1_254, "1.25 ms"),
            (9_996, "10.0 ms"),
            (113_342, "113 ms"),
            (999_600, "1.00 s"),
            (4_100_000, "4.10 s"),
            (59_960_000, "60.0 s"),
            (125_400_000, "2 min 5 s"),
        ] {
            assert_eq!(micros(us), text);
        }
    }
}
