//! A program that embeds the broker and names its keeper by path: `examples/embedded_broker.rs`.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Output},
};

use nix::unistd::close;
use vmmfd::broker::KeeperPath;

use crate::{
    examples,
    support::{
        material::{self, put},
        prelude::*,
        served::{copied, with_argument, without_twins},
        session::spawn_alone,
    },
};

/// The time limit of each wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// Copies of the embedding program and of `vmmfd`, and the processes that run them.
struct Place {
    folder: TempDir,
    socket: PathBuf,
    program: PathBuf,
    vmmfd: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let socket = at("broker.sock");
        let program = at("program");
        let vmmfd = at("vmmfd");
        copied(&examples::folder().join("embedded_broker"), &program);
        copied(&binary("vmmfd"), &vmmfd);
        Self { folder, socket, program, vmmfd }
    }

    fn command(&self, keeper: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(&self.socket).arg(keeper).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// Starts the program and waits until it serves.
    fn start(&self) -> Child {
        let mut child = spawn_alone(&mut self.command(&self.vmmfd));
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("embedded_broker: listens on "), "{line:?}");
        child
    }

    /// Runs a program that must fail, and returns its error.
    fn fail(&self, keeper: &Path) -> String {
        let Output { status, stderr, .. } = self.command(keeper).output().unwrap();
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{stderr}");
        stderr
    }

    fn keeper_socket(&self) -> PathBuf {
        self.folder.path().join("broker.sock.keeper")
    }

    /// The running keepers. A twin does not count.
    fn keepers(&self) -> Vec<Pid> {
        without_twins(&with_argument(&self.keeper_socket()))
    }

    /// The only running keeper.
    #[track_caller]
    fn keeper(&self) -> Pid {
        let keepers = self.keepers();
        assert_eq!(keepers.len(), 1, "{keepers:?}");
        assert_eq!(fs::read_link(format!("/proc/{}/exe", keepers[0])).unwrap(), self.vmmfd);
        keepers[0]
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket, &Config::default().timeout(PATIENCE)).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The program first: it would start another keeper. A twin continues when its keeper is killed.
        for path in [&self.socket, &self.keeper_socket()] {
            until(|| {
                let left = with_argument(path);
                for &pid in &left {
                    // Fails if it has exited.
                    let _ = kill(pid, Signal::SIGKILL);
                }
                // A twin may have forked another one meanwhile.
                left.is_empty()
            });
        }
    }
}

/// Kills a program. The end of its output shows that the keeper does not hold it open.
fn end(child: Child) {
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL).unwrap();
    child.wait_with_output().unwrap();
}

/// Stops a program with an orderly shutdown.
#[track_caller]
fn stop(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("ends with"), "{output:?}");
}

#[test]
fn embedded_objects_survive_kills() {
    let (subject, place) = (Subject::host(), Place::new());
    let mut program = place.start();
    let first = place.keeper();
    for value in 1..4 {
        put(&place.client(), &subject.driver, &format!("object-{value}"), value);
        // A second program is refused.
        let error = place.fail(&place.vmmfd);
        assert!(error.contains(&format!("already served by pid {}", program.id())), "{error}");
        end(program);
        assert!(is_alive(first));
        program = place.start();
        for earlier in 1..=value {
            assert_eq!(material::value(&place.client(), &subject.driver, &format!("object-{earlier}"))[1], earlier);
        }
    }
    assert_eq!(place.keeper(), first);
    // A killed keeper is replaced by the same `vmmfd`, and by nothing else: `Place::keeper` checks the file.
    kill(first, Signal::SIGKILL).unwrap();
    put(&place.client(), &subject.driver, "object-4", 4);
    // The signal may end the keeper after the put.
    until(|| matches!(place.keepers()[..], [keeper] if keeper != first));
    place.keeper();
    end(program);
}

/// A stop in order keeps the objects, and their keeper.
#[test]
fn unused_keeper_ends_with_its_program() {
    let (subject, place) = (Subject::host(), Place::new());
    for _ in 0..2 {
        let program = place.start();
        put(&place.client(), &subject.driver, "object", 1);
        stop(program);
        let keeper = place.keeper();
        let program = place.start();
        assert_eq!((place.keeper(), material::value(&place.client(), &subject.driver, "object")[1]), (keeper, 1));
        place.client().delete("object").unwrap();
        stop(program);
        until(|| place.keepers().is_empty());
        assert!(!place.keeper_socket().exists() && !place.socket.exists());
    }
}

#[test]
fn unusable_keeper_programs_are_refused() {
    let place = Place::new();
    let missing = place.folder.path().join("missing");
    let said = place.fail(&missing);
    assert!(
        said.contains(&format!("start the keeper {}", missing.display())) && said.contains("No such file"),
        "{said}"
    );
    let said = place.fail(Path::new("/bin/true"));
    assert!(said.contains("start the keeper /bin/true") && said.contains("it died before it listened"), "{said}");
    let said = place.fail(&place.program);
    assert!(said.contains("it is this program itself: give the path of the `vmmfd` program"), "{said}");
    // If the server fails to start, its keeper exits.
    fs::write(&place.socket, "no socket").unwrap();
    place.fail(&place.vmmfd);
    until(|| place.keepers().is_empty());
}

#[test]
fn server_takes_no_standard_descriptor() {
    let taken = in_child(
        "broker_embedded::server_takes_no_standard_descriptor",
        |_| {},
        || {
            (0..=2).for_each(|fd| close(fd).unwrap());
            let mut taken = Vec::new();
            for keeper in [None, Some(KeeperPath::Program(binary("vmmfd")))] {
                let mut config = ServerConfig::default();
                config.keeper = keeper;
                let broker = Broker::with(&Subject::host(), config);
                broker.client().list("").unwrap();
                taken.extend((0..=2).filter_map(|fd| fs::read_link(format!("/proc/self/fd/{fd}")).ok()));
            }
            format!("{taken:?}")
        },
    );
    assert_eq!(taken, "[]");
}
