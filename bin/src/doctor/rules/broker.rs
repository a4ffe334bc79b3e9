//! The rules of the broker: whether it can keep memory here, and what is at its socket.

use super::{
    Rule,
    predicates::{error_kind, has_error, is_call, is_of},
};
use crate::doctor::{Finding, Status, probes::problem};

/// The rules of its socket.
pub(super) const SOCKET: &[Rule] = &[
    Rule {
        name: "broker-folder",
        symptom: "`broker` fails: the folder of its socket is not safe, or can't be used",
        cause: "Clients connect by a folder that belongs to this user, is no link, and that no other user may write in: another \
                user could listen there in the broker's place.",
        remedy: "Remove what is in the folder's place, or set its mode to 0700, and start `vmmfd serve` again.",
        matches: |finding, _, _| has(finding, problem::FOLDER),
    },
    Rule {
        name: "broker-stale",
        symptom: "`broker` fails: no process listens on its socket",
        cause: "The broker that made the socket was killed, and so did not remove it.",
        remedy: "Start it again with `vmmfd serve`, which replaces the socket, or remove the file if no broker is wanted.",
        matches: |finding, _, _| has(finding, problem::STALE),
    },
    Rule {
        name: "broker-silent",
        symptom: "`broker` fails: the process that listens on its socket does not answer",
        cause: "The broker is stopped (SIGSTOP, a debugger, a frozen control group), hangs, or gets no CPU.",
        remedy: "Find it with `ss -xlp` and look at its state in `ps`, send it SIGCONT if it is stopped, else end it and start \
                 `vmmfd serve` again: what its clients have mapped stays.",
        matches: |finding, _, _| {
            has(finding, problem::SILENT) || is_of(finding, &["broker"]) && error_kind(finding) == Some("timeout")
        },
    },
    Rule {
        name: "broker-denied",
        symptom: "`broker` fails: this user may not connect to its socket",
        cause: "The socket's mode does not let this user connect, or a security module forbids it.",
        remedy: "Run the broker and its clients as one user, or start it with --allow-uid for this one; with SELinux give both \
                 containers the same label.",
        matches: |finding, _, _| has(finding, problem::DENIED),
    },
    Rule {
        name: "broker-refused",
        symptom: "`broker` fails: the broker refuses this connection",
        cause: "The broker runs, and its rules or its limits exclude this connection, as its answer says.",
        remedy: "Start it with --allow-uid for this user or with a larger --quota, as its answer says, or end clients that are \
                 not needed.",
        matches: |finding, _, _| has(finding, problem::REFUSED),
    },
    Rule {
        name: "broker-other-program",
        symptom: "`broker` fails: what is at its socket's path is no broker, or another user's",
        cause: "Another program, or another file, has the path of the broker's socket.",
        remedy: "See with `ss -xlp` which process it is, end it or remove the file, and start `vmmfd serve`, or give the broker \
                 and its clients another path with --socket.",
        matches: |finding, _, _| has(finding, problem::OTHER),
    },
];

/// The rules of its memory, of errors that no other rule explains.
pub(super) const MEMORY: &[Rule] = &[
    Rule {
        name: "persistence-off",
        symptom: "`persistence` is not offered: persistence mode is off",
        cause: "Persistence mode is off, so the driver drops the device's state, with memory that only descriptors hold, when \
                the last process that has the device open ends.",
        remedy: "On the machine itself run `nvidia-persistenced`, or `nvidia-smi -pm 1` as root, where a broker keeps memory: \
                 until then it stays only while some process has the device open.",
        matches: |finding, _, _| is_of(finding, &["persistence"]) && finding.status == Status::Unsupported,
    },
    Rule {
        name: "descriptor-not-kept",
        symptom: "`held-descriptor` fails at `cuMemImportFromShareableHandle`, `cuMemMap`, or as the bytes changed",
        cause: "The driver freed memory with the process that made it, although another process held its descriptor.",
        remedy: "Do not rely on a broker here: let the memory's maker live, or a process that has imported it, and see \
                     whether a newer driver, or the machine outside of this container or sandbox, keeps it.",
        matches: |finding, _, _| {
            let lost = ["cuMemImportFromShareableHandle", "cuMemMap"].iter().any(|call| is_call(finding, call));
            is_of(finding, &["held-descriptor"]) && finding.status == Status::Failed && (lost || !has_error(finding))
        },
    },
];

/// Whether the probe found this problem with the broker's socket.
fn has(finding: &Finding, problem: &str) -> bool {
    is_of(finding, &["broker"]) && finding.figures.get("problem").is_some_and(|found| found == problem)
}
