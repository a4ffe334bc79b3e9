use super::{super::element::NAMES, *};

/// The types on the wire.
fn dtypes() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter().map(|(_, name, _)| name).chain(["void8", "void128"])
}

fn has_no_order(dtype: &str) -> bool {
    matches!(dtype, "bool" | "int8" | "uint8") || dtype.starts_with("float8") || dtype.starts_with("void")
}

fn read(text: &str) -> Result<ArrayDescriptor, serde_json::Error> {
    serde_json::from_str(text)
}

fn written(array: &ArrayDescriptor) -> String {
    serde_json::to_string(array).unwrap()
}

#[test]
fn dtype_names_round_trip() {
    for dtype in dtypes() {
        let text = format!(r#"{{"dtype":"{dtype}","shape":[2,3],"strides":null,"offset":0}}"#);
        let made = ArrayDescriptor::new(element(dtype), [2, 3], Order::C).unwrap();
        assert_eq!(written(&made), text);
        assert_eq!(read(&text).unwrap(), made);
        let text = text.replace(r#","shape""#, r#","byte_order":"big","shape""#);
        if has_no_order(dtype) {
            let error = read(&text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("a byte_order of `big` is invalid for {dtype}")), "{error}");
        } else {
            let made = ArrayDescriptor { dtype: element(&format!(">{dtype}")), ..made };
            assert_eq!(written(&made), text);
            assert_eq!(read(&text).unwrap(), made);
        }
    }
}

#[test]
fn byte_order_defaults_to_little() {
    for dtype in dtypes() {
        for byte_order in ["", r#""byte_order":null,"#, r#""byte_order":"little","#] {
            let made = read(&format!(r#"{{"dtype":"{dtype}",{byte_order}"shape":[1]}}"#)).unwrap();
            assert_eq!(made, array(dtype, &[1], None, 0));
            assert!(!made.dtype.is_big_endian());
        }
    }
    for byte_order in [r#""middle""#, r#""Big""#, r#"">""#, r#""""#] {
        let error = read(&format!(r#"{{"dtype":"float32","byte_order":{byte_order},"shape":[1]}}"#)).unwrap_err();
        assert!(error.to_string().contains("is not a byte order: write little or big"), "{error}");
    }
}

#[test]
fn optional_fields_may_be_null() {
    for text in [
        r#"{"dtype":"uint8","shape":[]}"#,
        r#"{"dtype":"uint8","byte_order":null,"shape":[],"strides":null,"offset":null}"#,
        r#"{"colour":"red","typestr":"<f4","offset":0,"strides":null,"shape":[],"dtype":"uint8"}"#,
    ] {
        assert_eq!(read(text).unwrap(), array("|u1", &[], None, 0));
    }
    let text = r#"{"dtype":"float64","byte_order":"big","shape":[2,3],"strides":[-24,8],"offset":24}"#;
    let made = read(text).unwrap();
    assert_eq!(made, array(">f8", &[2, 3], Some(&[-24, 8]), 24));
    assert_eq!(written(&made), text);
}

#[test]
fn unknown_dtypes_are_refused() {
    let unknown = ",f32,bf16,half,float,<f4,|V16,>int16,<float32,Float32,float32 ,float33,float8_e5m3,float4_e2m1fn,object,\
                   datetime64[ns],void,void0,void12,void17179869184";
    for dtype in unknown.split(',') {
        let error = read(&format!(r#"{{"dtype":"{dtype}","shape":[1]}}"#)).unwrap_err().to_string();
        let sentence = format!(
            "`{dtype}` is not a dtype: write its name in NumPy or ml_dtypes, such as float32, bfloat16 or void128"
        );
        assert!(error.starts_with(&sentence), "{error}");
    }
    // The message stays short and printable for any text.
    for (field, other) in [("dtype", "byte_order"), ("byte_order", "dtype")] {
        let long = r"\u001b".repeat(10_000);
        let error =
            read(&format!(r#"{{"{field}":"{long}","{other}":"float32","shape":[1]}}"#)).unwrap_err().to_string();
        assert!(error.len() < 500 && !error.contains('\u{1b}') && error.contains(" is not a "), "{error}");
    }
}

#[test]
fn protocol_page_names_every_dtype() {
    let (_, page) = include_str!("../../../docs/protocol.md").split_once("\n`array` describes").unwrap();
    let (page, _) = page.split_once("\n\n").unwrap();
    let is_dtype = |word: &&str| read(&format!(r#"{{"dtype":{word:?},"shape":[1]}}"#)).is_ok();
    let mut named: Vec<&str> = page.split('`').skip(1).step_by(2).filter(is_dtype).collect();
    let mut want: Vec<&str> = dtypes().filter(|dtype| *dtype != "void8").collect();
    named.sort_unstable();
    want.sort_unstable();
    assert_eq!(named, want);
}

#[test]
fn malformed_descriptors_are_refused() {
    for text in [
        r#"{"shape":[1]}"#,
        r#"{"typestr":"<f4","shape":[1]}"#,
        r#"{"dtype":"float32"}"#,
        r#"{"dtype":null,"shape":[1]}"#,
        r#"{"dtype":4,"shape":[1]}"#,
        r#"{"dtype":["float32"],"shape":[1]}"#,
        r#"{"dtype":"float32","dtype":"float32","shape":[1]}"#,
        r#"{"dtype":"float32","byte_order":1,"shape":[1]}"#,
        r#"{"dtype":"float32","shape":null}"#,
        r#"{"dtype":"float32","shape":5}"#,
        r#"{"dtype":"float32","shape":[-1]}"#,
        r#"{"dtype":"float32","shape":[1.0]}"#,
        r#"{"dtype":"float32","shape":["1"]}"#,
        r#"{"dtype":"float32","shape":[18446744073709551616]}"#,
        r#"{"dtype":"float32","shape":[1],"strides":[9223372036854775808]}"#,
        r#"{"dtype":"float32","shape":[1],"strides":"C"}"#,
        r#"{"dtype":"float32","shape":[1],"offset":-1}"#,
    ] {
        assert!(read(text).is_err(), "{text}");
    }
}

#[test]
fn more_than_64_dimensions_are_refused() {
    let most = array("|u1", &[1; 64], Some(&[0; 64]), 0);
    assert_eq!(read(&written(&most)).unwrap(), most);
    most.check(1).unwrap();
    let sixty_five = vec!["1"; 65].join(",");
    // The invalid rest of the list must not be parsed.
    for lists in [format!(r#""shape":[{sixty_five},!"#), format!(r#""shape":[1],"strides":[{sixty_five},!"#)] {
        let error = read(&format!(r#"{{"dtype":"float32",{lists}"#)).unwrap_err();
        assert!(error.to_string().contains("at most 64"), "{error}");
    }
    let made = ArrayDescriptor { shape: vec![1; 65], strides: None, ..most };
    refused(ArrayDescriptor::new(U1, [1; 65], Order::C), "65 dimensions");
    refused(made.elements(), "65 dimensions");
    refused(made.check(u64::MAX), "65 dimensions");
    refused(made.offset_of(&[0; 65]), "65 dimensions");
}
