use super::*;

#[test]
fn orders_parse_in_either_case() {
    assert_eq!(
        ["C", "c", "F", "f"].map(|text| text.parse::<Order>().unwrap()),
        [Order::C, Order::C, Order::F, Order::F]
    );
    for text in ["", "A", "CF", "rows"] {
        assert!(text.parse::<Order>().unwrap_err().to_string().contains("write C "), "{text}");
    }
}

#[test]
fn shapes_parse_with_x_or_commas() {
    for (text, shape) in [
        ("5", &[5][..]),
        ("1024x768", &[1024, 768]),
        ("1024,768", &[1024, 768]),
        ("2x0x3", &[2, 0, 3]),
        ("2,0,3", &[2, 0, 3]),
        ("18446744073709551615x007", &[u64::MAX, 7]),
    ] {
        assert_eq!(parse_shape(text).unwrap(), shape);
    }
    for separator in ["x", ","] {
        assert_eq!(parse_shape(&vec!["1"; 64].join(separator)).unwrap(), [1; 64]);
    }
}

#[test]
fn invalid_shapes_are_refused() {
    for text in [
        "", " ", "x", "5x", "x5", "2xx3", "2X3", "2 x 3", " 5", "5\n", "-1", "+1", "2x-3", "1.5", "1e3", "0x10x", ",",
        "2,", ",2", "2,,3", "2, 3", "2x3,4", "2,3x4", "(2)", "(2,3)", "2×3", "٣",
    ] {
        let error = parse_shape(text).unwrap_err().to_string();
        assert!(error.contains("` is not a shape: write whole numbers separated by x or commas"), "{text:?}: {error}");
    }
    let long = parse_shape("2x18446744073709551616").unwrap_err().to_string();
    assert!(long.contains("is not a shape of lengths below 2⁶⁴: write smaller numbers"), "{long}");
    for separator in ["x", ","] {
        let many = parse_shape(&vec!["1"; 65].join(separator)).unwrap_err().to_string();
        assert!(many.contains("is not a shape of at most 64 dimensions: write fewer") && many.len() < 200, "{many}");
    }
}
