//! Names of objects.

use crate::{
    error::{BrokerError, RefusalCode},
    wire::{MAX_NAME, clean},
};

/// Checks a name: components of `[A-Za-z0-9._-]` separated by `/`, at most 255 bytes, no empty, `.` or `..` component.
pub(super) fn check_name(name: &str) -> Result<(), BrokerError> {
    let problem = match name {
        "" => "it is empty".to_owned(),
        _ if name.len() > MAX_NAME => return Err(too_long("name", name, name.len())),
        _ => match name.split('/').find_map(find_problem) {
            None => return Ok(()),
            Some(problem) => problem,
        },
    };
    Err(invalid("name", name, &problem))
}

/// Checks the prefix of a list or watch, which may be empty and matches nothing if no name starts with it.
pub(super) fn check_prefix(prefix: &str) -> Result<(), BrokerError> {
    match prefix.len() {
        0..=MAX_NAME => Ok(()),
        length => Err(too_long("prefix", prefix, length)),
    }
}

/// Checks the name of a part or a group: one component.
pub(super) fn check_component(what: &str, name: &str) -> Result<(), BrokerError> {
    match find_problem(name) {
        None if name.len() <= MAX_NAME => Ok(()),
        None => Err(too_long(what, name, name.len())),
        Some(problem) => Err(invalid(what, name, &problem)),
    }
}

fn find_problem(component: &str) -> Option<String> {
    match component {
        "" => Some("a component is empty".to_owned()),
        "." | ".." => Some(format!("a component is `{component}`")),
        _ => {
            let unfit = component.chars().find(|&c| !(c.is_ascii_alphanumeric() || "._-".contains(c)))?;
            Some(format!("it contains {unfit:?}, and only A-Z, a-z, 0-9, `.`, `_` and `-` are allowed"))
        }
    }
}

fn too_long(what: &str, name: &str, length: usize) -> BrokerError {
    invalid(what, name, &format!("it has {length} bytes, and at most {MAX_NAME} are allowed"))
}

fn invalid(what: &str, name: &str, problem: &str) -> BrokerError {
    let mut shown: String = name.chars().take(80).collect();
    clean(&mut shown);
    BrokerError::new(RefusalCode::Invalid, format!("the {what} `{shown}` can't be used: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_validated() {
        for good in ["a", "models/llama", "A.b_c-9/..x/...", &"n".repeat(255)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "/a", "a/", "a//b", ".", "a/../b", "a b", "a\n", "ä", "a\0", &"n".repeat(256)] {
            let error = check_name(bad).unwrap_err();
            assert_eq!(error.code, RefusalCode::Invalid);
            assert!(!error.message.contains('\n') && !error.message.contains('\0'), "{}", error.message);
        }
        assert!(check_component("part", "rank0").is_ok() && check_prefix(&"n".repeat(255)).is_ok());
        assert_eq!(check_prefix(&"n".repeat(256)).unwrap_err().code, RefusalCode::Invalid);
        assert!(check_component("part", "a/b").unwrap_err().message.contains("part"));
    }
}
