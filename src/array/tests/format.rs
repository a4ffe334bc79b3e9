use super::{
    super::format::{bfloat16, float16},
    *,
};

#[test]
fn elements_are_formatted_as_text() {
    for (dtype, bytes, shown) in [
        ("|b1", &[0][..], "false"),
        ("|b1", &[1], "true"),
        ("|b1", &[2], "0x02"),
        ("|i1", &[0xff], "-1"),
        ("<i2", &[0xfe, 0xff], "-2"),
        (">i2", &[0xff, 0xfe], "-2"),
        ("<i4", &[1, 2, 0, 0], "513"),
        ("<i8", &i64::MIN.to_le_bytes(), "-9223372036854775808"),
        ("|u1", &[0xff], "255"),
        (">u4", &[0, 0, 1, 2], "258"),
        ("<u8", &u64::MAX.to_le_bytes(), "18446744073709551615"),
        ("<f4", &0.1f32.to_le_bytes(), "0.1"),
        (">f4", &(-1f32).to_be_bytes(), "-1.0"),
        ("<f8", &1e300f64.to_le_bytes(), "1e300"),
        (">f8", &f64::NAN.to_be_bytes(), "NaN"),
        ("<f4", &f32::NEG_INFINITY.to_le_bytes(), "-inf"),
        ("<f2", &[0x00, 0x3c], "1.0"),
        (">f2", &[0xc0, 0x00], "-2.0"),
        ("<f2", &[0x01, 0x00], "5.9604645e-8"),
        ("bf16", &[0x80, 0x3f], "1.0"),
        (">bfloat16", &[0xc0, 0x00], "-2.0"),
        ("bf16", &[0x80], "0x80"),
        ("f8e5m2", &[0x01, 0x02], "0x0102"),
        ("<c8", &[1f32.to_le_bytes(), (-2f32).to_le_bytes()].concat(), "1.0-2.0j"),
        (">c16", &[1.5f64.to_be_bytes(), 0f64.to_be_bytes()].concat(), "1.5+0.0j"),
        ("<c8", &[f32::NAN.to_le_bytes(), f32::NAN.to_le_bytes()].concat(), "NaN+NaNj"),
        ("|V3", &[0, 0xab, 0x10], "0x00ab10"),
        ("<f4", &[1, 2], "0x0102"),
        ("<i8", &[1; 9], "0x010101010101010101"),
        ("|b1", &[], "0x"),
    ] {
        assert_eq!(element(dtype).format(bytes), shown, "{dtype} {bytes:?}");
    }
}

/// The value of a finite number of a binary format by the definition of IEEE 754, computed in a wider type than the code under test uses.
fn by_definition(code: u32, exponent_bits: u32, mantissa_bits: u32, bias: i32) -> f64 {
    let digits = format!("{code:0width$b}", width = (1 + exponent_bits + mantissa_bits) as usize);
    let (sign, rest) = digits.split_at(1);
    let (exponent, mantissa) = rest.split_at(exponent_bits as usize);
    let exponent = i32::from_str_radix(exponent, 2).unwrap();
    let leading = if exponent == 0 { 0.0 } else { 1.0 };
    let bits = mantissa.bytes().zip(1..).filter(|(bit, _)| *bit == b'1');
    let significand = leading + bits.map(|(_, place)| 2f64.powi(-place)).sum::<f64>();
    let magnitude = significand * 2f64.powi(exponent.max(1) - bias);
    if sign == "1" { -magnitude } else { magnitude }
}

/// Equality that distinguishes the signs of zeros and treats all NaNs as equal.
fn same(found: f32, expected: f64) -> bool {
    found.is_nan() && expected.is_nan() || f64::from(found).to_bits() == expected.to_bits()
}

#[test]
fn all_16_bit_floats_match_ieee_754() {
    for code in 0..=u16::MAX {
        for (found, exponent_bits, bias) in [(float16(code), 5, 15), (bfloat16(code), 8, 127)] {
            let mantissa_bits = 15 - exponent_bits;
            let magnitude = code & 0x7fff;
            let infinity = ((1u16 << exponent_bits) - 1) << mantissa_bits;
            let expected = match magnitude {
                _ if magnitude > infinity => f64::NAN,
                _ if magnitude == infinity => f64::INFINITY.copysign(if code >> 15 == 1 { -1.0 } else { 1.0 }),
                _ => by_definition(code.into(), exponent_bits, mantissa_bits, bias),
            };
            assert!(same(found, expected), "{code:#06x} with {exponent_bits} bits of exponent: {found:?} {expected:?}");
        }
    }
}

#[test]
fn all_8_bit_floats_match_ml_dtypes() {
    // Bits of exponent and of mantissa, bias, infinity, the codes of NaN, the largest number, the smallest number above zero.
    type Codes = &'static [std::ops::RangeInclusive<u8>];
    type Format = (&'static str, u32, u32, i32, Option<u8>, Codes, f64, f64);
    const UZ: Codes = &[0x80..=0x80];
    let formats: [Format; 7] = [
        ("float8_e3m4", 3, 4, 3, Some(0x70), &[0x71..=0x7f, 0xf1..=0xff], 15.5, 0.015625),
        ("float8_e4m3", 4, 3, 7, Some(0x78), &[0x79..=0x7f, 0xf9..=0xff], 240.0, 0.001953125),
        ("float8_e4m3b11fnuz", 4, 3, 11, None, UZ, 30.0, 0.0001220703125),
        ("float8_e4m3fn", 4, 3, 7, None, &[0x7f..=0x7f, 0xff..=0xff], 448.0, 0.001953125),
        ("float8_e4m3fnuz", 4, 3, 8, None, UZ, 240.0, 0.0009765625),
        ("float8_e5m2", 5, 2, 15, Some(0x7c), &[0x7d..=0x7f, 0xfd..=0xff], 57344.0, 0.0000152587890625),
        ("float8_e5m2fnuz", 5, 2, 16, None, UZ, 57344.0, 0.00000762939453125),
    ];
    for (dtype, exponent_bits, mantissa_bits, bias, infinity, nans, largest, smallest) in formats {
        let values = (0..=u8::MAX).map(|code| {
            let expected = match code {
                _ if nans.iter().any(|codes| codes.contains(&code)) => f64::NAN,
                _ if Some(code) == infinity => f64::INFINITY,
                _ if Some(code & 0x7f) == infinity => f64::NEG_INFINITY,
                _ => by_definition(code.into(), exponent_bits, mantissa_bits, bias),
            };
            let shown = element(dtype).format(&[code]);
            assert!(same(shown.parse().unwrap(), expected), "{dtype} {code:#04x}: {shown} {expected:?}");
            expected
        });
        let finite: Vec<f64> = values.filter(|value| value.is_finite()).collect();
        let above_zero = finite.iter().copied().filter(|value| *value > 0.0);
        assert_eq!(above_zero.clone().fold(0.0, f64::max), largest, "{dtype}");
        assert_eq!(above_zero.fold(f64::INFINITY, f64::min), smallest, "{dtype}");
    }
    for code in 0..=u8::MAX {
        let expected = if code == 255 { f64::NAN } else { 2f64.powi(i32::from(code) - 127) };
        let shown = ElementType::F8E8M0FNU.format(&[code]);
        assert!(same(shown.parse().unwrap(), expected), "{code}: {shown} {expected:?}");
    }
}
