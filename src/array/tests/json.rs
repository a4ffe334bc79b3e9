use serde_json::json;

use super::*;

#[test]
fn a_descriptor_is_read_as_numpy_would_write_it() {
    let interface = json!({
        "shape": [2, 3], "typestr": "<f8", "descr": [["", "<f8"]], "data": [140_000_000, false], "version": 3,
        "strides": [-24, 8], "offset": 24,
    });
    let read: ArrayDescriptor = serde_json::from_value(interface).unwrap();
    assert_eq!(read, array("<f8", &[2, 3], Some(&[-24, 8]), 24));
    for text in
        [r#"{"typestr":"|u1","shape":[]}"#, r#"{"typestr":"<u1","shape":[],"strides":null,"offset":0,"colour":"red"}"#]
    {
        assert_eq!(serde_json::from_str::<ArrayDescriptor>(text).unwrap(), array("|u1", &[], None, 0));
    }
    let written = serde_json::to_string(&floats(&[768, 1024])).unwrap();
    assert_eq!(written, r#"{"typestr":"<f4","shape":[768,1024],"strides":null,"offset":0}"#);
}

#[test]
fn what_is_no_descriptor_is_not_read() {
    for text in [
        r#"{"shape":[1]}"#,
        r#"{"typestr":"<f4"}"#,
        r#"{"typestr":"<f4","shape":null}"#,
        r#"{"typestr":"<f4","shape":5}"#,
        r#"{"typestr":"<f4","shape":[-1]}"#,
        r#"{"typestr":"<f4","shape":[1.0]}"#,
        r#"{"typestr":"<f4","shape":["1"]}"#,
        r#"{"typestr":"<f4","shape":[18446744073709551616]}"#,
        r#"{"typestr":"<f4","shape":[1],"strides":[9223372036854775808]}"#,
        r#"{"typestr":"<f4","shape":[1],"strides":"C"}"#,
        r#"{"typestr":"<f4","shape":[1],"offset":-1}"#,
        r#"{"typestr":"<f4","shape":[1],"offset":null}"#,
        r#"{"typestr":"|O8","shape":[1]}"#,
        r#"{"typestr":4,"shape":[1]}"#,
    ] {
        assert!(serde_json::from_str::<ArrayDescriptor>(text).is_err(), "{text}");
    }
}

#[test]
fn more_than_64_dimensions_are_refused_also_while_they_are_read() {
    let most = array("|u1", &[1; 64], Some(&[0; 64]), 0);
    let text = serde_json::to_string(&most).unwrap();
    assert_eq!(serde_json::from_str::<ArrayDescriptor>(&text).unwrap(), most);
    most.check(1).unwrap();
    let sixty_five = vec!["1"; 65].join(",");
    // The list goes on with nonsense: it must not be read that far.
    for lists in [format!(r#""shape":[{sixty_five},!"#), format!(r#""shape":[1],"strides":[{sixty_five},!"#)] {
        let error = serde_json::from_str::<ArrayDescriptor>(&format!(r#"{{"typestr":"<f4",{lists}"#)).unwrap_err();
        assert!(error.to_string().contains("at most 64"), "{error}");
    }
    let made = ArrayDescriptor { shape: vec![1; 65], strides: None, ..most };
    refused(ArrayDescriptor::new(U1, [1; 65], Order::C), "65 dimensions");
    refused(made.elements(), "65 dimensions");
    refused(made.check(u64::MAX), "65 dimensions");
    refused(made.offset_of(&[0; 65]), "65 dimensions");
    assert!(!made.is_contiguous(Order::C));
}
