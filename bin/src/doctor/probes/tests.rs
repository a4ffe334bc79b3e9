use vmmfd::error::{Error, LoadError};

use super::*;
use crate::doctor::{ErrorDetails, Status, outcome::ProbeOutcome};

const GONE: &str = "cannot open shared object file: No such file or directory";

fn driver(call: &'static str, number: u32) -> ErrorDetails {
    ErrorDetails::of(&Error::Driver { call, code: number, name: "CUDA_ERROR".into(), source: None })
}

fn outcome(probe: &str, error: ErrorDetails) -> ProbeOutcome {
    Probe::named(probe).unwrap().outcome_of(error.into())
}

#[test]
fn broken_library_is_a_failure() {
    let tried = |tried: String| ErrorDetails::of(&Error::Load(LoadError::NoLibrary { tried }));
    let nowhere = tried(format!("libcuda.so.1: {GONE}; libcuda.so: {GONE}"));
    assert!(nowhere.is_nothing_to_test());
    assert_eq!(outcome("driver", nowhere).status, Status::Unsupported);
    for broken in [
        format!("/opt/libcuda.so.1: file too short; libcuda.so: {GONE}"),
        format!("libcuda.so.1: wrong ELF class: ELFCLASS32; libcuda.so: {GONE}"),
        format!("libcuda.so.1: {GONE}; /opt/libcuda.so: invalid ELF header"),
        format!("libnvidia-x.so.1: {GONE}; libcuda.so: {GONE}"),
        "Error loading shared library libnvidia-x.so: No such file or directory (needed by /opt/libcuda.so.1)"
            .to_owned(),
    ] {
        let error = tried(broken);
        assert!(!error.is_nothing_to_test(), "{}", error.message);
        assert_eq!(outcome("driver", error).status, Status::Failed);
    }
}

#[test]
fn unsupported_codes_depend_on_the_probe() {
    let status = |probe, call, number| outcome(probe, driver(call, number)).status;
    assert_eq!(status("fabric", "cuMemCreate", 800), Status::Unsupported);
    for probe in ["memory", "export", "host-numa", "dma-buf", "pool", "round-trip"] {
        assert_eq!(status(probe, "cuMemCreate", 800), Status::Failed, "{probe}");
    }
    for probe in ["memory", "export", "host-numa", "dma-buf", "fabric", "pool", "legacy", "event", "peer"] {
        assert_eq!(status(probe, "cuMemCreate", 801), Status::Unsupported, "{probe}");
        assert_eq!(status(probe, "cuDevicePrimaryCtxRetain", 801), Status::Failed, "{probe}");
    }
    for probe in ["driver", "import", "round-trip", "aliases", "read-only-store", "export-cost"] {
        assert_eq!(status(probe, "cuMemExportToShareableHandle", 801), Status::Failed, "{probe}");
    }
}

#[test]
fn other_errors_do_not_mean_broken() {
    let meaning = |probe, call, number| outcome(probe, driver(call, number)).meaning;
    for (probe, call, number) in [
        ("read-only-store", "cuMemCreate", 2),
        ("wrong-descriptor", "cuDevicePrimaryCtxRetain", 46),
        ("memory", "cuMemCreate", 2),
        ("event", "cuDevicePrimaryCtxRetain", 201),
    ] {
        assert!(meaning(probe, call, number).starts_with("It could not be tested whether "), "{probe}");
    }
    assert_eq!(meaning("memory", "cuMemMap", 1), Probe::named("memory").unwrap().broken);
    assert_eq!(meaning("driver", "cuInit", 999), Probe::named("driver").unwrap().broken);
    let timeout = ErrorDetails::new("timeout", String::new());
    let cut = Probe::named("exporter-killed").unwrap().cut_short(None, timeout);
    assert_eq!((cut.status, cut.meaning.contains("could not be tested")), (Status::Failed, true));
}
