//! Runs each example as a program, and checks its output.

use crate::support::prelude::*;

cases! {
    on crate::running::Meeting; host and cuda: [
    a_buffer_is_shared_and_received,
    viewers_receive_frames,
    async_viewer_receives_all_frames,
    array_arrives_with_type_and_views,
    memory_travels_over_own_channel,
    ]
    gpus alone: [
    the_drivers_own_calls_share_memory,
    kernel_results_show_in_other_mapping,
    ]
}

/// The folder of the examples: in the bundle, or in cargo's target folder.
pub(crate) fn folder() -> PathBuf {
    let beside = env::current_exe().unwrap().parent().unwrap().to_owned();
    let found = [beside.join("examples"), beside.join("../examples")].into_iter().find(|folder| folder.is_dir());
    found.unwrap_or_else(|| panic!("no examples beside {}: cargo build --examples --features launch", beside.display()))
}

fn example(meeting: &Meeting, name: &str, arguments: &[&Path]) -> Run {
    let program = folder().join(name);
    assert!(program.is_file(), "no {}: cargo build --examples --features launch", program.display());
    let mut command = Command::new(program);
    command.args(arguments);
    let run = meeting.bare("producer").instead(command).env("VMMFD_BACKEND", meeting.backend());
    match meeting.driver_folder() {
        Some(folder) => run.env("LD_LIBRARY_PATH", folder),
        None => run,
    }
}

#[track_caller]
fn printed(ended: &Ended) -> Vec<String> {
    ended.code(0);
    ended.stdout.lines().map(str::to_owned).collect()
}

fn a_buffer_is_shared_and_received(meeting: Meeting) {
    let (socket, producer) = (meeting.socket(), example(&meeting, "share", &[&meeting.socket()]).start());
    let consumer = printed(&example(&meeting, "receive", &[&socket]).end());
    assert_eq!(consumer[1], "receive: it begins with `hello from the producer`");
    let producer = printed(&producer.end());
    assert!(producer[0].starts_with("share: 1048576 bytes on "), "{producer:?}");
    assert!(producer[1].ends_with(" had it"), "{producer:?}");
    assert!(!socket.exists(), "the socket stays");
}

fn viewers_receive_frames(meeting: Meeting) {
    let socket = meeting.socket();
    let viewers = [(); 2].map(|()| example(&meeting, "camera", &[Path::new("view"), &socket]).start());
    let camera = printed(&example(&meeting, "camera", &[Path::new("publish"), &socket]).end());
    assert!(camera.iter().any(|line| line.starts_with("camera: published 100 frames")), "{camera:?}");
    for viewer in viewers {
        let lines = printed(&viewer.end());
        assert!(
            lines.last().is_some_and(|line| line.starts_with("viewer: the stream ended after frame 100")),
            "{lines:?}"
        );
    }
}

fn async_viewer_receives_all_frames(meeting: Meeting) {
    let lines = printed(&example(&meeting, "tokio_viewer", &[]).end());
    assert!(lines[0].starts_with("viewer: 200 frames, ") && !lines[0].contains(" 0 cancelled"), "{lines:?}");
}

fn array_arrives_with_type_and_views(meeting: Meeting) {
    let lines = printed(&example(&meeting, "array", &[]).end());
    assert_eq!(
        lines,
        [
            "array: shares float32 3x4",
            "array: received float32 3x4",
            "array: the last column is 1.5, 3.5, 5.5",
            "array: every second number of row 1 is 2.0, 3.0",
            "array: its interface has type <f4 and shape [3]",
        ]
    );
}

fn memory_travels_over_own_channel(meeting: Meeting) {
    let lines = printed(&example(&meeting, "own_channel", &[]).end());
    assert!(
        lines[0].starts_with("own_channel: sends 1 descriptor and {\"memory\":{\"mechanism\":\"vmm\""),
        "{lines:?}"
    );
    assert_eq!(lines[1..], ["own_channel: received uint8 1000 with `hello`"]);
}

fn the_drivers_own_calls_share_memory(meeting: Meeting) {
    let lines = printed(&example(&meeting, "bare", &[]).end());
    assert_eq!(
        lines,
        ["consumer: found `written by the producer` in 2097152 bytes", "producer: found `written by the consumer`",]
    );
}

fn kernel_results_show_in_other_mapping(meeting: Meeting) {
    let lines = printed(&example(&meeting, "launch", &[]).end());
    assert_eq!(lines, ["launch: 1024 words, from 1000 to 2023"]);
}
