//! Known causes of failures: rules that give a finding its cause and its remedy.
//!
//! Each rule is about a failure that was observed, here or in the reports of others: a finding that none matches stays unexplained.

mod predicates;
mod table;

pub use self::table::RULES;
use super::{Environment, Finding, Status};

/// A known cause of failures.
#[derive(Debug)]
pub struct Rule {
    /// Its name, in a report.
    pub name: &'static str,
    /// What a user sees, for `docs/troubleshooting.md`.
    pub symptom: &'static str,
    /// Why.
    pub cause: &'static str,
    /// What to do.
    pub remedy: &'static str,
    /// Whether it is the cause of a finding that is `failed` or `unsupported`, in this environment.
    pub matches: fn(&Finding, &Environment) -> bool,
}

/// The first rule that matches a finding. One that is `ok` or skipped has none.
pub fn find(finding: &Finding, environment: &Environment) -> Option<&'static Rule> {
    if !matches!(finding.status, Status::Failed | Status::Unsupported) {
        return None;
    }
    RULES.iter().find(|rule| (rule.matches)(finding, environment))
}

/// Enters the cause and the remedy of the first rule that matches a finding.
pub fn explain(finding: &mut Finding, environment: &Environment) {
    if let Some(rule) = find(finding, environment) {
        finding.cause = Some(rule.cause.to_owned());
        finding.remedy = Some(rule.remedy.to_owned());
        finding.rule = Some(rule.name.to_owned());
    }
}

#[cfg(test)]
mod tests;
