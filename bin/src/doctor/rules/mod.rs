//! Rules that give a finding its cause and remedy.
//!
//! Each rule covers a failure that was observed or reported. Other findings have no explanation.

mod predicates;
mod table;

pub use self::table::RULES;
use super::{Environment, Finding, Status};

/// A known cause of failures.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    pub name: &'static str,
    /// The symptom for the user, in `docs/diagnose.md`.
    pub symptom: &'static str,
    pub cause: &'static str,
    pub remedy: &'static str,
    /// Whether the rule explains a `failed` or `unsupported` finding in this environment. In a meeting the last argument is the environment
    /// of the peer.
    pub matches: fn(&Finding, &Environment, Option<&Environment>) -> bool,
}

/// The first rule that matches a `failed` or `unsupported` finding.
pub fn find(finding: &Finding, environment: &Environment, peer: Option<&Environment>) -> Option<&'static Rule> {
    if !matches!(finding.status, Status::Failed | Status::Unsupported) {
        return None;
    }
    RULES.iter().find(|rule| (rule.matches)(finding, environment, peer))
}

/// Sets the cause and remedy of a finding from the first matching rule.
pub fn explain(finding: &mut Finding, environment: &Environment, peer: Option<&Environment>) {
    if let Some(rule) = find(finding, environment, peer) {
        finding.cause = Some(rule.cause.to_owned());
        finding.remedy = Some(rule.remedy.to_owned());
        finding.rule = Some(rule.name.to_owned());
    }
}

#[cfg(test)]
mod tests;
