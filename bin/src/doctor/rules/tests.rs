use std::collections::BTreeSet;

use serde_json::json;

use super::*;
use crate::doctor::{
    ErrorDetails,
    environment::{Library, SharedMemory},
};

/// The input of a rule: a finding, the environment, and the peer's environment.
#[derive(Clone)]
struct Input(Finding, Environment, Option<Environment>);

impl Input {
    /// An input in which no rule's cause holds.
    fn neutral() -> Self {
        let node = |path: &str| Node { path: path.to_owned(), mode: String::new(), uid: 0, gid: 0, usable: true };
        let environment = Environment {
            library: Some(Library { path: "/lib/libcuda.so.1".to_owned(), file: None, stub: false }),
            nodes: ["/dev/nvidiactl", "/dev/nvidia-uvm"].map(node).into(),
            imex_channels: vec![node("channel0")],
            shared_memory: Some(SharedMemory { exists: true, writable: true, size: None, free: None }),
            module: Some("595.58.03".to_owned()),
            module_open: Some(true),
            seccomp: Some(0),
            pid_namespace: Some(1),
            ipc_namespace: Some(1),
            label: Some("u:r:t:s0:c1,c2".to_owned()),
            ..Environment::default()
        };
        let mut peer = environment.clone();
        peer.label = None;
        Self(Finding::new("any", Status::Failed, ""), environment, Some(peer))
    }

    fn error(&mut self) -> &mut ErrorDetails {
        self.0.error.get_or_insert_with(|| ErrorDetails::new("other", String::new()))
    }

    fn figure(&mut self, name: &str, value: Value) {
        self.0.figures.insert(name.to_owned(), value);
    }

    /// Changes a neutral input so that a fact holds: the value with this index, of several.
    fn make(&mut self, fact: Fact, at: usize) {
        let env = &mut self.1;
        match fact {
            Probe(names) => self.0.probe = names[at % names.len()].to_owned(),
            Code(codes) => self.error().code = Some(codes[at % codes.len()]),
            Kind(kind) => self.error().kind = kind.to_owned(),
            Because(reasons) => self.error().reason = Some(reasons[at % reasons.len()]),
            Call(calls) => self.error().call = Some(calls[at % calls.len()].to_owned()),
            Killed(kill) => {
                self.error().kind = "signal".to_owned();
                self.error().name = Some(if kill { "SIGKILL" } else { "SIGSEGV" }.to_owned());
            }
            Error(true) => drop(self.error()),
            Error(false) | NoCode | GpuNode(false) | Wsl(false) | Driver | Categories => {}
            Is(status) => self.0.status = status,
            Problem(problem) => self.figure("problem", problem.into()),
            Permitted => self.figure("permitted", json!(true)),
            Exclusive => self.figure("compute_mode", json!(3)),
            Stub => env.library.as_mut().unwrap().stub = true,
            NoGpu => (env.module, env.nodes) = (None, Vec::new()),
            GpuNode(true) => env.nodes[0].path = "/dev/nvidia0".to_owned(),
            DeniedNode => env.nodes[0].usable = false,
            NoUvmNode => drop(env.nodes.pop()),
            NoChannel => env.imex_channels.clear(),
            NoUsableChannel => env.imex_channels[0].usable = false,
            Musl => env.c_library = Some(CLibrary::Musl),
            Container => env.container = Some("docker".to_owned()),
            NoCompute => env.driver_capabilities = Some("utility".to_owned()),
            OtherCategories => self.2.as_mut().unwrap().label = Some("u:r:t:s0:c3,c4".to_owned()),
            OtherNamespaces if at == 0 => env.pid_namespace = Some(2),
            OtherNamespaces => env.ipc_namespace = Some(2),
            OtherProc => env.own_proc = Some(false),
            Visible => env.visible_devices = Some("1".to_owned()),
            Wsl(true) => env.wsl = true,
            Gvisor => env.gvisor = true,
            Confidential => env.confidential = Some("tdx".to_owned()),
            Mig => env.mig = true,
            ClosedModule => env.module_open = Some(false),
            OldModule => env.module = Some("580.159.04".to_owned()),
            Filtered => env.seccomp = Some(2),
            NoShm => env.shared_memory.as_mut().unwrap().writable = false,
        }
    }

    /// An input in which all of these facts hold.
    fn of<'a>(facts: impl IntoIterator<Item = &'a Fact>, at: usize) -> Self {
        let mut input = Self::neutral();
        facts.into_iter().for_each(|fact| input.make(*fact, at));
        input
    }

    fn rule(&self) -> Option<&'static str> {
        find(&self.0, &self.1, self.2.as_ref()).map(|rule| rule.name)
    }
}

#[test]
fn each_alternative_finds_its_rule() {
    for Rule { name, when } in RULES {
        for facts in *when {
            for at in 0..14 {
                let mut input = Input::of(*facts, at);
                assert_eq!(input.rule(), Some(*name), "{facts:?}");
                for status in [Status::Ok, Status::Skipped] {
                    input.0.status = status;
                    assert_eq!(input.rule(), None, "{facts:?}");
                }
            }
        }
    }
}

#[test]
fn each_fact_is_needed() {
    for rule in RULES {
        for facts in rule.when {
            for missing in *facts {
                let others = facts.iter().filter(|fact| !std::ptr::eq(*fact, missing));
                let mut input = Input::of(others, 0);
                match missing {
                    Error(false) | Call(_) => drop(input.error()),
                    NoCode => input.error().code = Some(12345),
                    GpuNode(false) => input.make(GpuNode(true), 0),
                    Wsl(false) => input.make(Wsl(true), 0),
                    Driver => input.1.library = None,
                    Categories => input.1.label = Some("docker-default (enforce)".to_owned()),
                    Is(Status::Failed) => input.0.status = Status::Unsupported,
                    _ => {}
                }
                let Input(finding, environment, peer) = &input;
                assert!(!rule.matches(finding, environment, peer.as_ref()), "{}: {missing:?}", rule.name);
            }
        }
    }
    assert_eq!(Input::of(&[Code(&[12345]), Call(&["cuMemMap"])], 0).rule(), None);
}

#[test]
fn environments_of_each_fact() {
    let holds = |fact: Fact, change: &dyn Fn(&mut Environment)| {
        let mut environment = Environment::default();
        change(&mut environment);
        fact.holds_in(&environment)
    };
    for (list, lacks) in [("utility,video", true), ("all", false), ("utility, compute", false), ("", false)] {
        assert_eq!(holds(NoCompute, &|env| env.driver_capabilities = Some(list.to_owned())), lacks, "{list}");
    }
    for (label, has) in [("u:r:t:s0:c1", true), ("u:r:t:s0", false), ("docker-default (enforce)", false)] {
        assert_eq!(holds(Categories, &|env| env.label = Some(label.to_owned())), has, "{label}");
    }
    for (seccomp, container, filtered) in [(None, true, true), (None, false, false), (Some(0), true, false)] {
        let change = |env: &mut Environment| {
            (env.seccomp, env.container) = (seccomp, container.then(|| "docker".to_owned()));
        };
        assert_eq!(holds(Filtered, &change), filtered);
    }
    assert!(holds(OldModule, &|_| {}) && holds(NoGpu, &|_| {}) && !holds(NoShm, &|_| {}));
    assert!(!holds(NoGpu, &|env| env.pci_gpus = vec!["0000:01:00.0".to_owned()]));
}

#[test]
fn sentences_fit_their_rules() {
    let rows = include_str!("../rules.md").lines().skip(2).map(|row| row.split('`').nth(1).unwrap());
    assert!(rows.eq(RULES.iter().map(|rule| rule.name)), "rules.md has other rules, or another order");
    assert_eq!(RULES.iter().map(|rule| rule.name).collect::<BTreeSet<_>>().len(), RULES.len());
    for rule in RULES {
        let Sentences { symptom, cause, remedy } = rule.sentences().unwrap();
        for text in [cause, remedy] {
            assert!(text.ends_with('.') && !text.contains(". ") && !text.contains("  "), "{}: {text}", rule.name);
        }
        // The symptom's numbers are the codes of the conditions.
        let facts = rule.when.iter().copied().flatten();
        let codes: Vec<u32> = facts
            .filter_map(|fact| if let Code(codes) = fact { Some(*codes) } else { None })
            .flatten()
            .copied()
            .collect();
        let shown = symptom.split('(').filter_map(|part| part.split_once(')')?.0.parse().ok());
        for number in shown {
            assert!(codes.contains(&number), "{}: {number} is not in {codes:?}", rule.name);
        }
    }
}

#[test]
fn peer_errors_use_its_environment() {
    let mut theirs = Input::of(&[FABRIC, NOT_PERMITTED], 0);
    theirs.error().other_end = true;
    let Input(mut finding, own, peer) = theirs;
    let peer = Environment { imex_channels: Vec::new(), ..peer.unwrap() };
    explain(&mut finding, &own, Some(&peer));
    assert_eq!(finding.rule.as_deref(), Some("fabric-no-channel"));
    // A probe's own second process has no other environment.
    explain(&mut finding, &own, None);
    assert_eq!(finding.rule.as_deref(), Some("fabric-other-channel"));
}
