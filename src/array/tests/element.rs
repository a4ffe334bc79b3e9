use super::*;

#[test]
fn element_types_are_read_as_typestrs_and_by_name() {
    for (text, typestr, size) in [
        ("<f4", "<f4", 4),
        (">i2", ">i2", 2),
        ("|u1", "|u1", 1),
        ("<u1", "|u1", 1),
        (">b1", "|b1", 1),
        ("|b1", "|b1", 1),
        ("<c8", "<c8", 8),
        (">c16", ">c16", 16),
        ("|V16", "|V16", 16),
        (">V1", "|V1", 1),
        ("|V2147483647", "|V2147483647", (1 << 31) - 1),
        ("bool", "|b1", 1),
        ("i8", "|i1", 1),
        ("i16", "<i2", 2),
        ("i32", "<i4", 4),
        ("i64", "<i8", 8),
        ("u8", "|u1", 1),
        ("u16", "<u2", 2),
        ("u32", "<u4", 4),
        ("u64", "<u8", 8),
        ("f16", "<f2", 2),
        ("f32", "<f4", 4),
        ("f64", "<f8", 8),
        ("c64", "<c8", 8),
        ("c128", "<c16", 16),
    ] {
        let read = element(text);
        assert_eq!((read.to_string().as_str(), read.size()), (typestr, size), "{text}");
        assert_eq!(read, element(typestr));
    }
    assert!(element(">i2").is_big_endian() && !element(">i1").is_big_endian() && !element("i16").is_big_endian());
    assert_eq!(element("|V3").kind(), ElementKind::Raw);
}

#[test]
fn what_is_no_element_type_is_refused_in_one_sentence() {
    for text in [
        "",
        "<",
        "|",
        "f4",
        "f8",
        "F32",
        "<f",
        "<f3",
        "<f16",
        "<f04",
        "<f+4",
        "<f 4",
        "<f4 ",
        " <f4",
        "<<f4",
        "=f4",
        "=u1",
        "?b1",
        "|f4",
        "|i8",
        "<b2",
        "|b4",
        "|O",
        "|O8",
        "|S5",
        "<U5",
        "|V",
        "|V0",
        "|V2147483648",
        "|V99999999999999999999",
        "<M8[ns]",
        "<m8",
        "<t4",
        "<c4",
        "é4",
        "<é",
        "<fé",
        "\u{1b}[31m",
        "float32",
    ] {
        let error = text.parse::<ElementType>().unwrap_err();
        assert!(error.contains(" is no element type: write ") && !error.contains('\u{1b}'), "{text}: {error}");
    }
    for letter in ["é", "\u{1b}"] {
        let long = letter.repeat(1 << 20).parse::<ElementType>().unwrap_err();
        assert!(long.len() < 400 && !long.contains('\u{1b}'), "{long}");
    }
}

#[test]
fn elements_are_shown_as_people_write_them() {
    for (typestr, bytes, shown) in [
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
        ("<f2", &[0xff, 0x7b], "65504.0"),
        ("<f2", &[0x01, 0x00], "5.9604645e-8"),
        ("<f2", &[0xff, 0x03], "6.097555e-5"),
        ("<f2", &[0x00, 0x04], "6.1035156e-5"),
        ("<f2", &[0x00, 0x80], "-0.0"),
        ("<f2", &[0x00, 0x7c], "inf"),
        ("<f2", &[0x01, 0x7c], "NaN"),
        ("<c8", &[1f32.to_le_bytes(), (-2f32).to_le_bytes()].concat(), "1.0-2.0j"),
        (">c16", &[1.5f64.to_be_bytes(), 0f64.to_be_bytes()].concat(), "1.5+0.0j"),
        ("<c8", &[f32::NAN.to_le_bytes(), f32::NAN.to_le_bytes()].concat(), "NaN+NaNj"),
        ("|V3", &[0, 0xab, 0x10], "0x00ab10"),
        ("<f4", &[1, 2], "0x0102"),
        ("<i8", &[1; 9], "0x010101010101010101"),
        ("|b1", &[], "0x"),
    ] {
        assert_eq!(element(typestr).format(bytes), shown, "{typestr} {bytes:?}");
    }
}
