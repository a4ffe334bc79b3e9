//! The numbered rules of the protocol pages.

use vmmfd::internals::protocols;

/// The rules of both pages in order: the number, and the text on one line.
pub fn rules() -> Vec<(&'static str, String)> {
    let paragraphs = [protocols::PAGE, protocols::BROKER_PAGE].into_iter().flat_map(|page| page.split("\n\n"));
    let rule = |paragraph: &'static str| {
        let (number, text) = paragraph.strip_prefix("**")?.split_once("** ")?;
        let digits = number.strip_prefix(|c: char| c.is_ascii_uppercase())?;
        let valid = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        valid.then(|| (number, text.split_whitespace().collect::<Vec<_>>().join(" ")))
    };
    paragraphs.filter_map(rule).collect()
}

/// The rule with this number.
pub fn find(number: &str) -> Option<(&'static str, String)> {
    rules().into_iter().find(|(found, _)| *found == number)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::conform::{Role, cases};

    #[test]
    fn cases_name_existing_rules() {
        let rules = rules();
        let numbers: BTreeSet<&str> = rules.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers.len(), rules.len(), "a duplicate number");
        assert!(rules.len() > 50 && rules.iter().all(|(_, text)| text.ends_with(['.', ':', ')'])), "{rules:?}");
        for role in [Role::Consumer, Role::Producer, Role::Publisher, Role::Subscriber, Role::Client] {
            let cases = cases(role);
            let names: BTreeSet<&String> = cases.iter().map(|(name, _)| name).collect();
            assert_eq!(names.len(), cases.len(), "{role:?}: a duplicate name");
            for (name, of) in &cases {
                assert!(!of.is_empty() && of.iter().all(|rule| numbers.contains(rule)), "{role:?} {name}: {of:?}");
            }
        }
        assert!(find("T2").unwrap().1.starts_with("A record "));
        assert_eq!(find("Z9"), None);
    }
}
