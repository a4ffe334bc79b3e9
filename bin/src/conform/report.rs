//! What came of the cases.

use std::fmt::Write;

use schemars::JsonSchema;
use serde::Serialize;

use super::{ConformPlan, fault::Fault, page};
use crate::schema::VERSION;

/// What `vmmfd conform` reports.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct ConformReport {
    pub schema: u32,
    /// What this side played.
    #[schemars(extend("enum" = ["consumer", "producer", "publisher", "subscriber", "client"]))]
    pub role: &'static str,
    /// Where.
    pub socket: String,
    /// Whether no rule was found broken; null if for some case no other end came, or none was tried.
    pub conforms: Option<bool>,
    /// The cases that were tried, in their order.
    pub cases: Vec<CaseReport>,
    /// The rules that were broken, each once for a case.
    pub broken: Vec<RuleReport>,
    /// Why not all cases were tried.
    pub incomplete: Option<String>,
}

/// What came of one case.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct CaseReport {
    /// Its name.
    pub name: String,
    /// The rules that it is about.
    pub rules: &'static [&'static str],
    /// Whether they were kept.
    pub outcome: Outcome,
    /// What was found, or why it was left out.
    pub found: Option<String>,
}

/// What can come of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// The other end kept to the rules.
    Kept,
    /// It broke one.
    Broken,
    /// It does not do what the case is about, and need not.
    LeftOut,
    /// No other end came.
    NotMet,
}

/// A rule that was broken.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct RuleReport {
    /// Its number.
    pub rule: &'static str,
    /// Its text on the page.
    pub text: String,
    /// The case in which it was broken.
    pub case: String,
    /// What was found.
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

    /// Enters what came of a case.
    pub(super) fn enter(&mut self, name: &str, rules: &'static [&'static str], fault: Option<Fault>) -> &CaseReport {
        let (outcome, found) = match fault {
            None => (Outcome::Kept, None),
            Some(Fault::Broken { rule, found }) => {
                let (text, case) = (page::text(rule), name.to_owned());
                self.broken.push(RuleReport { rule, text, case, found: found.clone() });
                (Outcome::Broken, Some(format!("{rule}: {found}")))
            }
            Some(Fault::LeftOut(why)) => (Outcome::LeftOut, Some(why)),
            Some(Fault::Absent(why)) => (Outcome::NotMet, Some(why)),
            Some(Fault::Failed(error)) => (Outcome::NotMet, Some(error.in_full())),
        };
        let index = self.cases.len();
        self.cases.push(CaseReport { name: name.to_owned(), rules, outcome, found });
        &self.cases[index]
    }

    /// Concludes, of so many cases.
    pub(super) fn finish(&mut self, all: usize) {
        let not_met = self.cases.iter().find(|case| case.outcome == Outcome::NotMet);
        if let Some(case) = not_met {
            let tried = self.cases.len() - 1;
            self.incomplete =
                Some(format!("{tried} of {all} cases were tried: {}", case.found.clone().unwrap_or_default()));
        } else if self.cases.iter().all(|case| case.outcome == Outcome::LeftOut) {
            self.incomplete = Some("the other end does nothing of what was to be tried".to_owned());
        }
        self.conforms = match (self.broken.is_empty(), &self.incomplete) {
            (false, _) => Some(false),
            (true, None) => Some(true),
            (true, Some(_)) => None,
        };
    }

    /// The exit code: 0 if it conforms, 1 if a rule was broken, 4 if neither can be said.
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
            Outcome::NotMet => "not met",
        };
        let what = case.found.clone().unwrap_or_else(|| case.rules.join(" "));
        let _ = writeln!(text, "{outcome:<8}  {:<36}  {what}", case.name);
    }
    for RuleReport { rule, text: of, .. } in &report.broken {
        let line = format!("\nrule {rule}: {of}\n");
        // The same rule may be broken in many ways.
        if !text.contains(&line) {
            text.push_str(&line);
        }
    }
    let of = |outcome: Outcome| report.cases.iter().filter(|case| case.outcome == outcome).count();
    let (kept, broken, left_out) = (of(Outcome::Kept), of(Outcome::Broken), of(Outcome::LeftOut));
    let verdict = match report.conforms {
        Some(true) => "conforms",
        Some(false) => "DOES NOT CONFORM",
        None => "not found out",
    };
    let _ = writeln!(text, "\n{verdict}: {kept} cases kept, {broken} broken, {left_out} left out");
    if let Some(error) = &report.incomplete {
        let _ = writeln!(text, "{error}");
    }
    text
}
