use serde_json::json;

use super::*;

#[test]
fn serialises_as_version_3_dictionary() {
    let made = floats(&[2, 3]).slice(0, 0..2, -1).unwrap();
    assert_eq!(
        serde_json::to_value(made.interface(0x7f00_0000_0000, Access::ReadOnly).unwrap()).unwrap(),
        json!({
            "shape": [2, 3], "typestr": "<f4", "data": [0x7f00_0000_000cu64, true], "version": 3, "strides": [-12, 4],
            "stream": null,
        })
    );
    let whole = serde_json::to_value(floats(&[2]).interface(256, Access::ReadWrite).unwrap()).unwrap();
    assert_eq!((&whole["strides"], &whole["data"]), (&json!(null), &json!([256, false])));
    floats(&[2]).interface(u64::MAX - 8, Access::ReadWrite).unwrap();
    refused(floats(&[2]).interface(u64::MAX - 7, Access::ReadWrite), "exceeds the address space");
    assert_eq!(array("<f4", &[0], None, 5).interface(u64::MAX, Access::ReadWrite).unwrap().data, (0, false));
}

#[test]
fn types_without_typestr_are_refused() {
    for dtype in ["bfloat16", ">bfloat16", "float8_e4m3fn", "float8_e8m0fnu"] {
        let made = array(dtype, &[2], None, 0);
        refused(
            made.interface(256, Access::ReadWrite),
            &format!("can't describe elements of type {dtype}: it has no typestr"),
        );
        let words = ArrayDescriptor { dtype: element(if made.dtype.size() == 2 { "u16" } else { "u8" }), ..made };
        assert_eq!(words.interface(256, Access::ReadWrite).unwrap().data, (256, false));
    }
    for (dtype, typestr) in [("bool", "|b1"), (">int16", ">i2"), ("half", "<f2"), ("void128", "|V16")] {
        assert_eq!(array(dtype, &[], None, 0).interface(256, Access::ReadWrite).unwrap().typestr, typestr);
    }
}
