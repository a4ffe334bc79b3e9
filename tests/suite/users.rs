//! Sockets and folders of other users. Only root can change its user: `make test-all` runs these tests as root, or reports that it does not.

use std::os::unix::fs::chown;

use crate::support::prelude::*;

/// An unused user ID.
const OTHER: u32 = 12345;

mod root {
    use super::*;

    fn as_other(mut run: Run) -> Run {
        run.command.uid(OTHER).gid(OTHER);
        run
    }

    /// A folder that other users can enter, with commands that they can execute.
    fn open_place() -> Meeting {
        assert!(nix::unistd::geteuid().is_root(), "these tests change users: run them as root");
        let mut meeting = Meeting::new(On::Host);
        fs::set_permissions(meeting.folder(), PermissionsExt::from_mode(0o777)).unwrap();
        meeting.copy_binaries();
        meeting
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn another_user_is_refused_unless_allowed() {
        let meeting = open_place();
        // A producer that allows another user: its socket file is accessible, but it refuses the connection.
        let allows = |uid: &str| meeting.producer(&["--allow-uid", uid, "--timeout", "10s"]).start();
        let producer = allows("54321");
        wait_for("the socket", || meeting.socket().exists());
        let refused = as_other(meeting.consumer(&[])).end();
        refused.code(4).says("uid 12345").says("--allow-uid");
        meeting.consumer(&[]).end().code(0);
        producer.end().code(0);

        let producer = allows("12345");
        wait_for("the socket", || meeting.socket().exists());
        // Root is always allowed, also for a producer of another user.
        as_other(meeting.consumer(&[])).end().code(0);
        producer.end().code(0);

        // A consumer refuses the memory of another user, unless it allows that user.
        let mut producer = as_other(meeting.producer(&["--allow-uid", "54321", "--timeout", "10s"]));
        producer.command.uid(OTHER);
        let producer = producer.start();
        wait_for("the socket", || meeting.socket().exists());
        let third = |options: &[&str]| {
            let mut third = meeting.consumer(options);
            third.command.uid(54321).gid(54321);
            third.end()
        };
        third(&[]).code(4).says("runs as uid 12345, which is not allowed here");
        third(&["--allow-uid", "12345"]).code(0);
        producer.end().code(0);
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn default_folder_of_another_user_is_refused() {
        let meeting = open_place();
        let folder = meeting.folder().join("vmmfd");
        fs::create_dir(&folder).unwrap();
        chown(&folder, Some(OTHER), Some(OTHER)).unwrap();
        for name in ["producer", "consumer"] {
            let mut run = meeting.bare(name).env("XDG_RUNTIME_DIR", meeting.folder());
            run.command.args(["--backend", "host"]);
            run.end().code(5).says("belongs to uid 12345");
        }
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn without_permission_the_reason_is_said() {
        let meeting = open_place();
        let producer = meeting.producer(&[]).start();
        wait_for("the socket", || meeting.socket().exists());
        as_other(meeting.consumer(&["--timeout", "300ms"])).end().code(4).says("does not let this user connect");
        as_other(meeting.producer(&[])).end().code(2).says("may not connect to check it");
        meeting.consumer(&[]).end().code(0);
        producer.end().code(0);
    }
}
