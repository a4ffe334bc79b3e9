//! The numbered rules of the protocols' pages.

use vmmfd::internals::protocols;

/// The pages: that of handoffs and streams, and the broker's.
const PAGES: [&str; 2] = [protocols::PAGE, protocols::BROKER_PAGE];

/// The rules of the pages, in their order: the number, and the text on one line.
pub fn rules() -> Vec<(&'static str, String)> {
    let paragraphs = PAGES.iter().flat_map(|page| page.split("\n\n")).filter_map(|paragraph| {
        let (number, text) = paragraph.strip_prefix("**")?.split_once("** ")?;
        is_number(number).then(|| (number, text.split_whitespace().collect::<Vec<_>>().join(" ")))
    });
    paragraphs.collect()
}

/// The text of a rule; empty if there is none of that number.
pub fn text(number: &str) -> String {
    rules().into_iter().find(|(found, _)| *found == number).map(|(_, text)| text).unwrap_or_default()
}

/// A letter and digits.
fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix(|c: char| c.is_ascii_uppercase());
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::conform::{Role, cases};

    #[test]
    fn each_number_is_given_once_and_each_case_names_rules_of_the_page() {
        let rules = rules();
        let numbers: BTreeSet<&str> = rules.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers.len(), rules.len(), "a number is given twice");
        assert!(rules.len() > 50 && rules.iter().all(|(_, text)| text.ends_with(['.', ':', ')'])), "{rules:?}");
        for role in [Role::Consumer, Role::Producer, Role::Publisher, Role::Subscriber, Role::Client] {
            let cases = cases(role);
            let names: BTreeSet<&String> = cases.iter().map(|(name, _)| name).collect();
            assert_eq!(names.len(), cases.len(), "{role:?} has two cases of one name");
            for (name, of) in &cases {
                assert!(!of.is_empty() && of.iter().all(|rule| numbers.contains(rule)), "{role:?} {name}: {of:?}");
            }
        }
        assert_eq!(
            text("T2"),
            "A record without a single byte means that the sender has hung up, as does the end of the connection."
        );
        assert_eq!(text("Z9"), "");
    }
}
