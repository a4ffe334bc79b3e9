//! The loader's library search. The loader reads LD_LIBRARY_PATH at program start, so each test runs in a separate process.

use super::*;

/// The driver that a child process opens with this library path.
fn opened(test: &str, choice: Choice, library_path: &Path, environment: &[(&str, &str)]) -> String {
    let prepare = |command: &mut Command| {
        // Hide this machine's driver settings from the child.
        let inherited = env::vars_os().map(|(name, _)| name);
        let steering = inherited.filter(|name| {
            let name = name.to_string_lossy();
            name == "CUDA_VISIBLE_DEVICES" || name.starts_with("FAKECUDA_")
        });
        steering.for_each(|name| {
            command.env_remove(name);
        });
        command.env("LD_LIBRARY_PATH", library_path).envs(environment.iter().copied());
    };
    in_child(&format!("cuda_library::search::{test}"), prepare, || match open(choice) {
        Ok(opened) => {
            let device = Device::find(&opened.driver, Selector::default()).unwrap().name().to_owned();
            let fallback = opened.fallback.map_or("no fallback".to_owned(), |reason| format!("fallback: {reason}"));
            format!("{} {} | {fallback}", opened.driver.backend(), device.trim())
        }
        Err(error) => format!("error: {error}"),
    })
}

const CUDA: Choice = Choice::Only(Backend::Cuda);

#[test]
fn names_are_tried_in_order() {
    let both = Copy::new().with_device_name("a stub");
    both.write("libcuda.so");
    let driver = Copy::new().with_device_name("the driver");
    fs::copy(driver.write("libcuda.so.1"), both.folder().join("libcuda.so.1")).unwrap();
    // An invalid file under the first name hides this machine's driver.
    let second = Copy::new().with_device_name("the second");
    second.write("libcuda.so");
    let none = tempfile::tempdir().unwrap();
    hide_driver(none.path());
    fs::copy(none.path().join("libcuda.so.1"), second.folder().join("libcuda.so.1")).unwrap();
    let failed = "error: no CUDA driver library loads";
    for (folder, begin) in
        [(both.folder(), "cuda the driver | "), (second.folder(), "cuda the second | "), (none.path(), failed)]
    {
        let found = opened("names_are_tried_in_order", CUDA, folder, &[]);
        assert!(found.starts_with(begin), "{found}");
        let both_names = found.contains("libcuda.so.1: ") && found.contains("libcuda.so: ");
        assert_eq!(both_names, begin == failed, "{found}");
    }
}

#[test]
fn auto_does_not_hide_broken_drivers() {
    let stub = "error: libcuda.so.1 is the CUDA toolkit's stub library, not a driver";
    let old = "error: the driver library libcuda.so.1 has no cuInit: the driver is too old for this";
    for (case, copy, fault, expected) in [
        ("failing", Copy::new(), "cuInit:1:999", "error: cuInit failed: CUDA_ERROR_UNKNOWN (999)"),
        ("a stub", Copy::new(), "cuInit:1:34", stub),
        ("too old", Copy::new().without("cuInit"), "", old),
    ] {
        copy.write("libcuda.so.1");
        let environment = [("FAKECUDA_FAIL", fault)];
        let environment = if fault.is_empty() { &[][..] } else { &environment };
        let found = opened("auto_does_not_hide_broken_drivers", Choice::Auto, copy.folder(), environment);
        assert_eq!(found, expected, "{case}");
    }
}
