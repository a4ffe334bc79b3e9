use super::{super::element::NAMES, *};

/// What is written, the name that is printed, the typestr, the size.
const READ: &[(&str, &str, Option<&str>, u64)] = &[
    ("bool", "bool", Some("|b1"), 1),
    ("|b1", "bool", Some("|b1"), 1),
    (">b1", "bool", Some("|b1"), 1),
    ("int8", "int8", Some("|i1"), 1),
    ("i8", "int8", Some("|i1"), 1),
    (">int8", "int8", Some("|i1"), 1),
    ("int16", "int16", Some("<i2"), 2),
    ("i16", "int16", Some("<i2"), 2),
    ("short", "int16", Some("<i2"), 2),
    (">i2", ">int16", Some(">i2"), 2),
    (">int16", ">int16", Some(">i2"), 2),
    ("<int16", "int16", Some("<i2"), 2),
    ("int32", "int32", Some("<i4"), 4),
    ("i32", "int32", Some("<i4"), 4),
    ("int", "int32", Some("<i4"), 4),
    ("int64", "int64", Some("<i8"), 8),
    ("i64", "int64", Some("<i8"), 8),
    ("long", "int64", Some("<i8"), 8),
    ("<i8", "int64", Some("<i8"), 8),
    (">i8", ">int64", Some(">i8"), 8),
    ("uint8", "uint8", Some("|u1"), 1),
    ("u8", "uint8", Some("|u1"), 1),
    ("|u1", "uint8", Some("|u1"), 1),
    ("<u1", "uint8", Some("|u1"), 1),
    ("uint16", "uint16", Some("<u2"), 2),
    ("u16", "uint16", Some("<u2"), 2),
    ("uint32", "uint32", Some("<u4"), 4),
    ("u32", "uint32", Some("<u4"), 4),
    ("uint64", "uint64", Some("<u8"), 8),
    ("u64", "uint64", Some("<u8"), 8),
    ("float16", "float16", Some("<f2"), 2),
    ("f16", "float16", Some("<f2"), 2),
    ("half", "float16", Some("<f2"), 2),
    ("float32", "float32", Some("<f4"), 4),
    ("f32", "float32", Some("<f4"), 4),
    ("float", "float32", Some("<f4"), 4),
    ("<f4", "float32", Some("<f4"), 4),
    (">float32", ">float32", Some(">f4"), 4),
    ("float64", "float64", Some("<f8"), 8),
    ("f64", "float64", Some("<f8"), 8),
    ("double", "float64", Some("<f8"), 8),
    ("complex64", "complex64", Some("<c8"), 8),
    ("c64", "complex64", Some("<c8"), 8),
    ("cfloat", "complex64", Some("<c8"), 8),
    ("<c8", "complex64", Some("<c8"), 8),
    ("complex128", "complex128", Some("<c16"), 16),
    ("c128", "complex128", Some("<c16"), 16),
    ("cdouble", "complex128", Some("<c16"), 16),
    (">c16", ">complex128", Some(">c16"), 16),
    ("bfloat16", "bfloat16", None, 2),
    ("bf16", "bfloat16", None, 2),
    (">bfloat16", ">bfloat16", None, 2),
    ("float8_e3m4", "float8_e3m4", None, 1),
    ("f8e3m4", "float8_e3m4", None, 1),
    ("float8_e4m3", "float8_e4m3", None, 1),
    ("f8e4m3", "float8_e4m3", None, 1),
    ("float8_e4m3b11fnuz", "float8_e4m3b11fnuz", None, 1),
    ("f8e4m3b11fnuz", "float8_e4m3b11fnuz", None, 1),
    ("float8_e4m3fn", "float8_e4m3fn", None, 1),
    ("f8e4m3fn", "float8_e4m3fn", None, 1),
    (">float8_e4m3fn", "float8_e4m3fn", None, 1),
    ("float8_e4m3fnuz", "float8_e4m3fnuz", None, 1),
    ("f8e4m3fnuz", "float8_e4m3fnuz", None, 1),
    ("float8_e5m2", "float8_e5m2", None, 1),
    ("f8e5m2", "float8_e5m2", None, 1),
    ("float8_e5m2fnuz", "float8_e5m2fnuz", None, 1),
    ("f8e5m2fnuz", "float8_e5m2fnuz", None, 1),
    ("float8_e8m0fnu", "float8_e8m0fnu", None, 1),
    ("f8e8m0fnu", "float8_e8m0fnu", None, 1),
    ("|V16", "void128", Some("|V16"), 16),
    ("void128", "void128", Some("|V16"), 16),
    (">V1", "void8", Some("|V1"), 1),
    ("void8", "void8", Some("|V1"), 1),
    ("<void8", "void8", Some("|V1"), 1),
    ("<V2", "void16", Some("|V2"), 2),
    ("|V2147483647", "void17179869176", Some("|V2147483647"), (1 << 31) - 1),
    ("void17179869176", "void17179869176", Some("|V2147483647"), (1 << 31) - 1),
];

#[test]
fn element_types_parse_from_names_of_numpy_pytorch_and_rust_and_from_typestrs() {
    for &(text, printed, typestr, size) in READ {
        let read = element(text);
        assert_eq!((read.to_string().as_str(), read.size()), (printed, size), "{text}");
        assert_eq!(read.typestr().as_deref(), typestr, "{text}");
        assert_eq!(element(printed), read, "what is printed parses to the same type");
        assert_eq!(
            (read.name().as_ref(), read.is_big_endian()),
            match printed.strip_prefix('>') {
                Some(name) => (name, true),
                None => (printed, false),
            }
        );
        if let Some(typestr) = typestr {
            assert_eq!(element(typestr), read);
        }
    }
    for (known, name, others) in NAMES {
        for text in others.iter().chain([&name]) {
            assert_eq!(element(text), known);
            assert!(READ.iter().any(|(read, ..)| read == text), "{text} is not in the list above");
        }
    }
    assert_eq!([element("f32"), element("bf16"), element("f8e5m2")], [F4, ElementType::BF16, ElementType::F8E5M2]);
}

#[test]
fn what_is_not_an_element_type_is_refused_in_one_sentence() {
    for text in [
        "",
        "<",
        "|",
        "f4",
        "f8",
        "F32",
        "Float32",
        "BF16",
        "float32 ",
        " float32",
        "torch.float32",
        "<f32",
        ">bf16",
        "|float32",
        "=float32",
        "<<float32",
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
        "void",
        "void0",
        "void4",
        "void12",
        "void08",
        "void+8",
        "void17179869184",
        "void99999999999999999999",
        "object",
        "str",
        "bytes",
        "datetime64[ns]",
        "<M8[ns]",
        "<m8",
        "<t4",
        "<c4",
        "float128",
        "complex32",
        "int4",
        "float4_e2m1fn",
        "float8",
        "float8_e5m3",
        "é4",
        "<é",
        "<fé",
        "\u{1b}[31m",
    ] {
        let error = text.parse::<ElementType>().unwrap_err().to_string();
        assert!(error.contains(" is not an element type: write ") && !error.contains('\u{1b}'), "{text}: {error}");
    }
    for letter in ["é", "\u{1b}"] {
        let long = letter.repeat(1 << 20).parse::<ElementType>().unwrap_err().to_string();
        assert!(long.len() < 600 && !long.contains('\u{1b}'), "{long}");
    }
}
