//! What is known of how sharing fails: rules that give a finding its cause and its remedy.

use super::{Environment, Finding};

/// What is known of one way to fail.
#[derive(Debug)]
pub struct Rule {
    /// Its name, in a report.
    pub name: &'static str,
    /// What a person sees, for the README.
    pub symptom: &'static str,
    /// Why.
    pub cause: &'static str,
    /// What to do.
    pub remedy: &'static str,
    /// Whether a finding that is not `ok`, of this environment, is of this kind.
    pub matches: fn(&Finding, &Environment) -> bool,
}

/// The rules, the most particular first.
pub const RULES: &[Rule] = &[];

/// Gives a finding that is not `ok` the cause and the remedy of the first rule that matches.
pub fn explain(finding: &mut Finding, environment: &Environment) {
    if let Some(rule) = RULES.iter().find(|rule| (rule.matches)(finding, environment)) {
        finding.cause = Some(rule.cause.to_owned());
        finding.remedy = Some(rule.remedy.to_owned());
        finding.rule = Some(rule.name.to_owned());
    }
}
