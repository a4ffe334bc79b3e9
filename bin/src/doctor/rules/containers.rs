//! The rules of containers, and of programs built for another C library: each is more specific than those of every machine.

use super::{
    Rule,
    predicates::{categories, has_error, has_reason, is_of, no_library, other_categories},
};
use crate::doctor::{environment::CLibrary, error_details::Reason};

/// The rules, the most specific first.
pub(super) const RULES: &[Rule] = &[
    Rule {
        name: "musl",
        symptom: "`no CUDA driver library loads`, of a program that was built for musl",
        cause: "NVIDIA's driver library is built for glibc, and this program for musl: a static program loads no library \
                (`Dynamic loading not supported`), and a dynamic one not this library.",
        remedy: "Build for a target that ends in -gnu, such as x86_64-unknown-linux-gnu, and use an image with glibc 2.28 or \
                 newer: Debian, Ubuntu or UBI rather than Alpine.",
        matches: |finding, environment, _| no_library(finding) && environment.c_library == Some(CLibrary::Musl),
    },
    Rule {
        name: "capability-missing",
        symptom: "`no CUDA driver library loads`, with `NVIDIA_DRIVER_CAPABILITIES` set and without compute",
        cause: "The container's runtime adds the libraries that NVIDIA_DRIVER_CAPABILITIES names, and libcuda.so.1 comes \
                with compute, which is not among them.",
        remedy: "Set NVIDIA_DRIVER_CAPABILITIES=compute in the image or for the container, or unset it.",
        matches: |finding, environment, _| {
            let gives_compute = |list: &str| {
                list.split(',').map(str::trim).any(|capability| matches!(capability, "all" | "compute" | ""))
            };
            let named = environment.driver_capabilities.as_deref();
            no_library(finding) && named.is_some_and(|list| !gives_compute(list))
        },
    },
    Rule {
        name: "selinux-categories",
        symptom: "`does not let this user connect`, although the modes permit it, or `descriptors were cut off`, of two ends whose \
                  SELinux categories differ",
        cause: "SELinux gives each container categories of its own, and lets no process of one connect to a socket, or take a \
                descriptor, of another.",
        remedy: "Give both containers the same label: one pod in Kubernetes, or the same \
                 seLinuxOptions.level; --security-opt label=level:s0:c100,c200 for Docker and Podman.",
        matches: |finding, environment, peer| {
            let own = categories(environment);
            let permitted = finding.figures.get("permitted").is_some_and(|permitted| permitted == true);
            let denied = permitted && has_reason(finding, Reason::ConnectDenied) && own.is_some();
            let cut_off = has_reason(finding, Reason::DescriptorsLost);
            denied || cut_off && peer.is_some_and(|peer| other_categories(environment, peer))
        },
    },
    Rule {
        name: "legacy-namespaces",
        symptom: "`legacy` fails between two ends of different PID or IPC namespaces",
        cause: "The driver knows the owner of a legacy handle by its process number, and two ends that are both process 1, \
                each in a PID namespace of its own as in two containers, are one process to it.",
        remedy: "Share by file descriptor, which needs none of this: --mechanism vmm, the default.",
        matches: |finding, environment, peer| {
            let apart = peer.is_some_and(|peer| {
                let differ =
                    |own: Option<u64>, theirs: Option<u64>| own.zip(theirs).is_some_and(|(own, theirs)| own != theirs);
                differ(environment.pid_namespace, peer.pid_namespace)
                    || differ(environment.ipc_namespace, peer.ipc_namespace)
            });
            is_of(finding, &["legacy"]) && has_error(finding) && apart
        },
    },
];
