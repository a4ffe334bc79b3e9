//! The report of a run.

use std::fmt::Write;

use schemars::JsonSchema;
use serde::Serialize;

use super::{CaseEnd, ConformPlan, page};
use crate::schema::VERSION;

/// The report of `vmmfd conform`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct ConformReport {
    pub schema: u32,
    /// The role that this side played.
    #[schemars(extend("enum" = ["consumer", "producer", "publisher", "subscriber", "client"]))]
    pub role: &'static str,
    /// The path of the socket.
    pub socket: String,
    /// Whether the peer violated no rule; null if no peer was available for a case, or every case was left out.
    pub conforms: Option<bool>,
    /// The cases in the order in which they ran.
    pub cases: Vec<CaseReport>,
    /// The violated rules, once per case.
    pub broken: Vec<RuleReport>,
    /// Why not all cases ran.
    pub incomplete: Option<String>,
}

/// The result of one case.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct CaseReport {
    pub name: String,
    /// The numbers of the rules that it tests.
    pub rules: Vec<&'static str>,
    pub outcome: Outcome,
    /// The violation, or why the case was left out.
    pub found: Option<String>,
}

/// The outcome of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// The peer followed the rules.
    Kept,
    /// The peer violated a rule.
    Broken,
    /// The peer lacks an optional feature that the case needs.
    LeftOut,
    /// No peer was available.
    NotMet,
}

/// A violated rule.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct RuleReport {
    /// Its number.
    pub rule: &'static str,
    /// Its text in the protocol page.
    pub text: String,
    /// The case that found the violation.
    pub case: String,
    /// The violation.
    pub found: String,
}

impl ConformReport {
    pub(super) fn new(plan: &ConformPlan) -> Self {
        Self {
            schema: VERSION,
            role: plan.role.as_str(),
            socket: plan.socket.display().to_string(),
            conforms: None,
            cases: Vec::new(),
            broken: Vec::new(),
            incomplete: None,
        }
    }

    /// Adds the result of a case.
    pub(super) fn add(&mut self, name: &str, rules: &[&'static str], end: Option<CaseEnd>) -> &CaseReport {
        let (outcome, found) = match end {
            None => (Outcome::Kept, None),
            Some(CaseEnd::Violation { rule, found }) => {
                let text = page::find(rule).map(|(_, text)| text).unwrap_or_default();
                self.broken.push(RuleReport { rule, text, case: name.to_owned(), found: found.clone() });
                (Outcome::Broken, Some(format!("{rule}: {found}")))
            }
            Some(CaseEnd::Skipped(reason)) => (Outcome::LeftOut, Some(reason)),
            Some(CaseEnd::NoPeer(reason)) => (Outcome::NotMet, Some(reason)),
            Some(CaseEnd::Internal(error)) => (Outcome::NotMet, Some(error.in_full())),
        };
        let index = self.cases.len();
        self.cases.push(CaseReport { name: name.to_owned(), rules: rules.to_vec(), outcome, found });
        &self.cases[index]
    }

    /// Computes the conclusion. `all` is the number of selected cases.
    pub(super) fn finish(&mut self, all: usize) {
        let not_met = self.cases.iter().find(|case| case.outcome == Outcome::NotMet);
        if let Some(case) = not_met {
            let (ran, reason) = (self.cases.len() - 1, case.found.as_deref().unwrap_or_default());
            self.incomplete = Some(format!("{ran} of {all} cases ran: {reason}"));
        } else if self.cases.iter().all(|case| case.outcome == Outcome::LeftOut) {
            self.incomplete = Some("the peer has none of the features that the selected cases test".to_owned());
        }
        self.conforms = match (self.broken.is_empty(), &self.incomplete) {
            (false, _) => Some(false),
            (true, None) => Some(true),
            (true, Some(_)) => None,
        };
    }

    /// The exit code: 0 if the peer conforms, 1 if it violated a rule, 4 if the run was inconclusive.
    pub fn exit_code(&self) -> u8 {
        match self.conforms {
            Some(true) => 0,
            Some(false) => 1,
            None => 4,
        }
    }
}

/// The report as text.
pub fn render(report: &ConformReport) -> String {
    let mut text = String::new();
    for case in &report.cases {
        let outcome = match case.outcome {
            Outcome::Kept => "ok",
            Outcome::Broken => "BROKEN",
            Outcome::LeftOut => "left out",
            Outcome::NotMet => "no peer",
        };
        let details = case.found.clone().unwrap_or_else(|| case.rules.join(" "));
        let _ = writeln!(text, "{outcome:<8}  {:<36}  {details}", case.name);
    }
    for RuleReport { rule, text: rule_text, .. } in &report.broken {
        let line = format!("\nrule {rule}: {rule_text}\n");
        // Several cases may violate the same rule.
        if !text.contains(&line) {
            text.push_str(&line);
        }
    }
    let count = |outcome: Outcome| report.cases.iter().filter(|case| case.outcome == outcome).count();
    let (kept, broken, left_out) = (count(Outcome::Kept), count(Outcome::Broken), count(Outcome::LeftOut));
    let verdict = match report.conforms {
        Some(true) => "conforms",
        Some(false) => "DOES NOT CONFORM",
        None => "inconclusive",
    };
    let _ = writeln!(text, "\n{verdict}: {kept} cases passed, {broken} failed, {left_out} left out");
    if let Some(reason) = &report.incomplete {
        let _ = writeln!(text, "{reason}");
    }
    text
}
