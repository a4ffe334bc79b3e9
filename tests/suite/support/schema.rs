//! Checks JSON against a JSON Schema: the keywords that the project's schemas use, and no others.

use serde_json::Value;

/// What of `value` is not as `schema` says: the first thing found, with its place. `root` is the whole schema, for references.
pub(crate) fn mismatch(root: &Value, schema: &Value, value: &Value) -> Option<String> {
    let wrong = |what: String| Some(format!("{value} {what}"));
    for (keyword, rule) in schema.as_object().expect("a schema is an object") {
        let number = || rule.as_u64().unwrap();
        let found =
            match keyword.as_str() {
                "$schema" | "$id" | "$defs" | "title" | "description" => None,
                "$ref" => {
                    let target = rule.as_str().unwrap().strip_prefix('#').expect("a reference into the same file");
                    mismatch(root, root.pointer(target).expect("the target of a reference"), value)
                }
                "type" => {
                    let fits = match rule.as_str().unwrap() {
                        "object" => value.is_object(),
                        "array" => value.is_array(),
                        "string" => value.is_string(),
                        "boolean" => value.is_boolean(),
                        "null" => value.is_null(),
                        "integer" => value.is_u64() || value.is_i64(),
                        "number" => value.is_number(),
                        other => panic!("type {other} is not supported here"),
                    };
                    if fits { None } else { wrong(format!("is not of type {rule}")) }
                }
                "enum" if !rule.as_array().unwrap().contains(value) => wrong(format!("is none of {rule}")),
                "const" if rule != value => wrong(format!("is not {rule}")),
                "anyOf" => {
                    let each: Vec<_> = rule.as_array().unwrap().iter().map(|one| mismatch(root, one, value)).collect();
                    if each.iter().any(Option::is_none) { None } else { wrong(format!("fits none: {each:?}")) }
                }
                "required" => {
                    let mut names = rule.as_array().unwrap().iter().map(|name| name.as_str().unwrap());
                    names.find(|name| value.get(name).is_none()).and_then(|name| wrong(format!("lacks {name}")))
                }
                "properties" => rule.as_object().unwrap().iter().find_map(|(name, rule)| {
                    mismatch(root, rule, value.get(name)?).map(|what| format!("{name}: {what}"))
                }),
                "additionalProperties" if *rule == Value::Bool(false) => {
                    let known = &schema["properties"];
                    let names = value.as_object().into_iter().flat_map(|fields| fields.keys());
                    let mut others = names.filter(|name| known.get(name.as_str()).is_none());
                    others.next().and_then(|name| wrong(format!("has {name} too")))
                }
                "items" => value.as_array().into_iter().flatten().find_map(|item| mismatch(root, rule, item)),
                "minItems" if value.as_array().is_some_and(|items| (items.len() as u64) < number()) => {
                    wrong(format!("has fewer than {rule} items"))
                }
                "maxItems" if value.as_array().is_some_and(|items| items.len() as u64 > number()) => {
                    wrong(format!("has more than {rule} items"))
                }
                "maxLength" if value.as_str().is_some_and(|text| text.chars().count() as u64 > number()) => {
                    wrong(format!("is longer than {rule}"))
                }
                "minimum" | "maximum" => {
                    let whole = |value: &Value| value.as_u64().map(i128::from).or(value.as_i64().map(i128::from));
                    let bound = whole(rule).expect("a whole bound");
                    let fits = |value| if keyword == "minimum" { value >= bound } else { value <= bound };
                    if whole(value).is_none_or(fits) { None } else { wrong(format!("is beyond {keyword} {bound}")) }
                }
                "pattern" => {
                    let fits = |text| matches(rule.as_str().unwrap(), text);
                    if value.as_str().is_none_or(fits) { None } else { wrong(format!("does not match {rule}")) }
                }
                "enum" | "const" | "additionalProperties" | "minItems" | "maxItems" | "maxLength" => None,
                other => panic!("the keyword {other} is not supported here"),
            };
        if found.is_some() {
            return found;
        }
    }
    None
}

/// Whether a text matches a pattern of literal characters and classes of characters, with counts, from its beginning to its end.
/// Counts take as much as there is.
fn matches(pattern: &str, text: &str) -> bool {
    let mut pattern = pattern.strip_prefix('^').and_then(|rest| rest.strip_suffix('$')).expect("an anchored pattern");
    let mut text = text;
    while let Some(first) = pattern.chars().next() {
        let class = match first {
            '[' => {
                let (class, rest) = pattern[1..].split_once(']').unwrap();
                pattern = rest;
                class
            }
            _ => {
                let (literal, rest) = pattern.split_at(first.len_utf8());
                pattern = rest;
                literal
            }
        };
        let (mut least, mut most) = (1, 1);
        if let Some((count, rest)) = pattern.strip_prefix('{').and_then(|rest| rest.split_once('}')) {
            let (from, to) = count.split_once(',').unwrap_or((count, count));
            (least, most, pattern) = (from.parse().unwrap(), to.parse().unwrap(), rest);
        }
        let run = text.chars().take(most).take_while(|c| in_class(class, *c));
        let (count, length) = run.fold((0, 0), |(count, length), c| (count + 1, length + c.len_utf8()));
        if count < least {
            return false;
        }
        text = &text[length..];
    }
    text.is_empty()
}

fn in_class(class: &str, c: char) -> bool {
    let mut rest: &[char] = &class.chars().collect::<Vec<_>>();
    loop {
        match rest {
            [from, '-', to, after @ ..] => {
                if (*from..=*to).contains(&c) {
                    return true;
                }
                rest = after;
            }
            [one, after @ ..] => {
                if *one == c {
                    return true;
                }
                rest = after;
            }
            [] => return false,
        }
    }
}

#[test]
fn the_checker_tells_what_fits_from_what_does_not() {
    for (pattern, text, fits) in [
        ("^a[0-9a-f]{2}-$", "a0f-", true),
        ("^a[0-9a-f]{2}-$", "a0-", false),
        ("^a[0-9a-f]{2}-$", "a0f-x", false),
        ("^[0-9A-Za-z_-]{1,3}$", "_-Z", true),
        ("^[0-9A-Za-z_-]{1,3}$", "", false),
        ("^[0-9A-Za-z_-]{1,3}$", "aaaa", false),
    ] {
        assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
    }
    let schema = serde_json::json!({"type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": "integer", "minimum": 1, "maximum": u64::MAX},
            "b": {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 1, "items": {"const": "x"}}]}}});
    for (value, fits) in [
        (serde_json::json!({"a": 1, "b": null}), true),
        (serde_json::json!({"a": u64::MAX, "b": ["x"]}), true),
        (serde_json::json!({"a": 0}), false),
        (serde_json::json!({"a": 1.5}), false),
        (serde_json::json!({"a": 1, "b": ["y"]}), false),
        (serde_json::json!({"a": 1, "b": ["x", "x"]}), false),
        (serde_json::json!({"a": 1, "c": 1}), false),
        (serde_json::json!({}), false),
        (serde_json::json!([]), false),
    ] {
        assert_eq!(mismatch(&schema, &schema, &value).is_none(), fits, "{value}");
    }
}
