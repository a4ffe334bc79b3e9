//! Known causes of failures: rules that give a finding its cause and its remedy.
//!
//! Each rule is about a failure that was observed, here or in the reports of others: a finding that none matches stays unexplained.

mod broker;
mod containers;
mod predicates;
mod table;

use super::{Environment, Finding, Status};

/// All rules, the most specific first.
pub const RULES: &[Rule] = &joined::<
    { containers::RULES.len() + broker::SOCKET.len() + table::GENERAL.len() + broker::MEMORY.len() },
>([containers::RULES, broker::SOCKET, table::GENERAL, broker::MEMORY]);

/// The rules of several tables as one.
const fn joined<const N: usize>(tables: [&[Rule]; 4]) -> [Rule; N] {
    let mut all = [tables[0][0]; N];
    let (mut table, mut next) = (0, 0);
    while table < tables.len() {
        let mut rule = 0;
        while rule < tables[table].len() {
            all[next] = tables[table][rule];
            (rule, next) = (rule + 1, next + 1);
        }
        table += 1;
    }
    all
}

/// A known cause of failures.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Its name, in a report.
    pub name: &'static str,
    /// What a user sees, for `docs/diagnose.md`.
    pub symptom: &'static str,
    /// Why.
    pub cause: &'static str,
    /// What to do.
    pub remedy: &'static str,
    /// Whether it is the cause of a finding that is `failed` or `unsupported`, in this environment and, of two ends that meet,
    /// with this one at the other.
    pub matches: fn(&Finding, &Environment, Option<&Environment>) -> bool,
}

/// The first rule that matches a finding. One that is `ok` or skipped has none.
pub fn find(finding: &Finding, environment: &Environment, peer: Option<&Environment>) -> Option<&'static Rule> {
    if !matches!(finding.status, Status::Failed | Status::Unsupported) {
        return None;
    }
    RULES.iter().find(|rule| (rule.matches)(finding, environment, peer))
}

/// Enters the cause and the remedy of the first rule that matches a finding.
pub fn explain(finding: &mut Finding, environment: &Environment, peer: Option<&Environment>) {
    if let Some(rule) = find(finding, environment, peer) {
        finding.cause = Some(rule.cause.to_owned());
        finding.remedy = Some(rule.remedy.to_owned());
        finding.rule = Some(rule.name.to_owned());
    }
}

#[cfg(test)]
mod tests;
