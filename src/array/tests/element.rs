use super::{super::element::NAMES, *};

/// The printed name, the typestr, the size, and other accepted names.
const TYPES: &[(&str, Option<&str>, u64, &[&str])] = &[
    ("bool", Some("|b1"), 1, &[">b1"]),
    ("int8", Some("|i1"), 1, &["i8", ">int8"]),
    ("int16", Some("<i2"), 2, &["i16", "short", "<int16"]),
    (">int16", Some(">i2"), 2, &[]),
    ("int32", Some("<i4"), 4, &["i32", "int"]),
    ("int64", Some("<i8"), 8, &["i64", "long"]),
    (">int64", Some(">i8"), 8, &[]),
    ("uint8", Some("|u1"), 1, &["u8", "<u1"]),
    ("uint16", Some("<u2"), 2, &["u16"]),
    ("uint32", Some("<u4"), 4, &["u32"]),
    ("uint64", Some("<u8"), 8, &["u64"]),
    ("float16", Some("<f2"), 2, &["f16", "half"]),
    ("float32", Some("<f4"), 4, &["f32", "float"]),
    (">float32", Some(">f4"), 4, &[]),
    ("float64", Some("<f8"), 8, &["f64", "double"]),
    ("complex64", Some("<c8"), 8, &["c64", "cfloat"]),
    ("complex128", Some("<c16"), 16, &["c128", "cdouble"]),
    (">complex128", Some(">c16"), 16, &[]),
    ("bfloat16", None, 2, &["bf16"]),
    (">bfloat16", None, 2, &[]),
    ("float8_e3m4", None, 1, &["f8e3m4"]),
    ("float8_e4m3", None, 1, &["f8e4m3"]),
    ("float8_e4m3b11fnuz", None, 1, &["f8e4m3b11fnuz"]),
    ("float8_e4m3fn", None, 1, &["f8e4m3fn", ">float8_e4m3fn"]),
    ("float8_e4m3fnuz", None, 1, &["f8e4m3fnuz"]),
    ("float8_e5m2", None, 1, &["f8e5m2"]),
    ("float8_e5m2fnuz", None, 1, &["f8e5m2fnuz"]),
    ("float8_e8m0fnu", None, 1, &["f8e8m0fnu"]),
    ("void128", Some("|V16"), 16, &[]),
    ("void8", Some("|V1"), 1, &[">V1", "<void8"]),
    ("void16", Some("|V2"), 2, &["<V2"]),
    ("void17179869176", Some("|V2147483647"), (1 << 31) - 1, &[]),
];

#[test]
fn known_names_and_typestrs_parse() {
    for &(printed, typestr, size, others) in TYPES {
        for &text in others.iter().chain([&printed]).chain(&typestr) {
            let read = element(text);
            assert_eq!((read.to_string().as_str(), read.size()), (printed, size), "{text}");
            assert_eq!(read.typestr().as_deref(), typestr, "{text}");
            let name = printed.strip_prefix('>');
            assert_eq!((read.name().as_ref(), read.is_big_endian()), (name.unwrap_or(printed), name.is_some()));
        }
    }
    for (known, name, others) in NAMES {
        for text in others.iter().chain([&name]) {
            assert_eq!(element(text), known);
            assert!(
                TYPES.iter().any(|(read, .., others)| read == text || others.contains(text)),
                "{text} is not in TYPES"
            );
        }
    }
    assert_eq!([element("f32"), element("bf16"), element("f8e5m2")], [F4, ElementType::BF16, ElementType::F8E5M2]);
}

#[test]
fn dlpack_codes_identify_types() {
    let names = ["bool", "int64", "uint8", "float16", "bfloat16", "complex128", "float8_e4m3fn", "float8_e8m0fnu"];
    let codes = [(6, 8), (0, 64), (1, 8), (2, 16), (4, 16), (5, 128), (10, 8), (14, 8)];
    assert_eq!(names.map(|name| element(name).dlpack().unwrap()), codes);
    for (known, name, _) in NAMES {
        let (code, bits) = known.dlpack().unwrap();
        assert_eq!((u64::from(bits), ElementType::from_dlpack(code, bits)), (8 * known.size(), Some(known)), "{name}");
    }
    assert_eq!([">int16", "void8"].map(|name| element(name).dlpack()), [None, None]);
    // Opaque handles, complex numbers of two float16, and 4-bit integers.
    assert_eq!([(3, 64), (5, 32), (0, 4)].map(|(code, bits)| ElementType::from_dlpack(code, bits)), [None; 3]);
}

/// Texts that are not types, separated by commas.
const INVALID: &str = "\
    ,<,|,f4,f8,F32,Float32,BF16,float32 , float32,torch.float32,<f32,>bf16,|float32,=float32,\
    <<float32,<f,<f3,<f16,<f04,<f+4,<f 4,<f4 , <f4,<<f4,=f4,=u1,?b1,|f4,|i8,<b2,|b4,|O,|O8,|S5,<U5,\
    |V,|V0,|V2147483648,|V99999999999999999999,void,void0,void4,void12,void08,void+8,\
    void17179869184,void99999999999999999999,object,str,bytes,datetime64[ns],<M8[ns],<m8,<t4,<c4,\
    float128,complex32,int4,float4_e2m1fn,float8,float8_e5m3,é4,<é,<fé,\u{1b}[31m";

#[test]
fn unknown_types_are_refused() {
    for text in INVALID.split(',') {
        let error = text.parse::<ElementType>().unwrap_err().to_string();
        assert!(error.contains(" is not an element type: write ") && !error.contains('\u{1b}'), "{text}: {error}");
    }
    for letter in ["é", "\u{1b}"] {
        let long = letter.repeat(1 << 20).parse::<ElementType>().unwrap_err().to_string();
        assert!(long.len() < 600 && !long.contains('\u{1b}'), "{long}");
    }
}
