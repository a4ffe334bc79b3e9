//! The broker demo that `make demo` runs last.

use super::*;

fn run(place: &Meeting, options: &[&str]) -> Ended {
    let programs = PathBuf::from(place.bare("vmmfd").command.get_program());
    // In a bundle the script is beside the programs.
    let bundled = programs.with_file_name("demo-broker");
    let script = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/demo-broker"));
    let script = if script.exists() { script } else { bundled };
    let mut demo = Command::new(script);
    demo.arg(programs.parent().unwrap()).args(["--backend", place.backend()]).args(options);
    demo.env("TMPDIR", place.folder());
    let ended = place.bare("vmmfd").instead(demo).end();
    // The demo leaves no process and no file.
    wait_for("the end of all processes", || place.processes().is_empty());
    assert_eq!(place.files(), <[String; 0]>::default());
    ended
}

fn shows_every_step(place: Meeting) {
    let ended = run(&place, &[]);
    let steps: Vec<&str> = ended.code(0).stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(steps, ["broker", "put", "MODE", "0600", "got", "saved", "broker", "demo:"], "{}", ended.stdout);
}

#[test]
fn shows_every_step_and_leaves_nothing() {
    shows_every_step(Meeting::host());
}

#[test]
fn one_that_fails_leaves_nothing() {
    run(&Meeting::host(), &["--device", "9"]).code(3).says("demo: FAILED (put exited with 3)");
}

mod cuda {
    #[test]
    #[ignore = "needs an NVIDIA GPU: make test-gpu"]
    fn shows_every_step_and_leaves_nothing() {
        super::shows_every_step(super::Meeting::cuda());
    }
}
