//! The broker's commands as separate processes: output, exit codes and leftover files.

use crate::{
    support::prelude::*,
    weights::{self, tensor},
};

mod get;
mod others;
mod put;
mod recall;

/// A broker in its own process, on the socket of a `Meeting`.
struct Broker {
    place: Meeting,
    server: Running,
}

impl Broker {
    fn host() -> Self {
        Self::at(Meeting::host(), &[])
    }

    fn cuda() -> Self {
        Self::at(Meeting::cuda(), &[])
    }

    /// Starts a second broker on the same backend with these options.
    fn another(&self, options: &[&str]) -> Self {
        Self::at(self.place.another(), options)
    }

    fn at(place: Meeting, options: &[&str]) -> Self {
        let mut server = serve(&place, options).start();
        server.until("listening");
        Self { place, server }
    }

    /// A client command on this broker's socket.
    fn run(&self, arguments: &[&str]) -> Run {
        command(&self.place, arguments)
    }

    fn end(&self, arguments: &[&str]) -> Ended {
        self.run(arguments).end()
    }

    /// The JSON of a successful command.
    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        self.end(&[arguments, &["--json"]].concat()).code(0).json()
    }

    /// The error in the JSON of a failing command. Standard error has the same sentence and no other error.
    #[track_caller]
    fn refusal(&self, arguments: &[&str], code: i32, kind: &str) -> String {
        let ended = self.end(&[arguments, &["--json"]].concat());
        let value = ended.code(code).json();
        assert_eq!(value["error"]["kind"], kind, "{arguments:?}: {value}");
        let message = value["error"]["message"].as_str().unwrap().to_owned();
        assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
        // Errors of the command-line parser are only in the object.
        if kind != "usage" || !ended.stderr.is_empty() {
            ended.says(&message);
            assert_eq!(ended.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{}", ended.stderr);
        }
        message
    }

    #[track_caller]
    fn put(&self, name: &str, bytes: &[u8], options: &[&str]) -> Value {
        let file = self.file("input", bytes);
        self.json(&[&["put", name, "--from", text(&file)], options].concat())
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.place.folder().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn client(&self) -> Client {
        Client::connect(&self.place.socket(), &Config::default()).unwrap()
    }

    /// A lease in this process, without a mapping.
    fn lease(&self, name: &str) -> (Client, Lease) {
        let client = self.client();
        let lease = client.get(&Get::new(name)).unwrap();
        (client, lease)
    }

    fn names(&self) -> Vec<String> {
        let listed = self.json(&["ls"]);
        listed["objects"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub(crate) fn vmmfd(place: &Meeting, arguments: &[&str]) -> Run {
    let mut run = place.bare("vmmfd");
    run.command.args(arguments).env("VMMFD_BROKER_SOCKET", place.socket());
    run
}

fn command(place: &Meeting, arguments: &[&str]) -> Run {
    let run = vmmfd(place, arguments);
    if ["put", "get"].contains(&arguments[0]) { run.env("VMMFD_BACKEND", place.backend()) } else { run }
}

pub(crate) fn serve(place: &Meeting, options: &[&str]) -> Run {
    let emulated: &[&str] = if place.is_fake() { &["--emulated"] } else { &[] };
    vmmfd(place, &[&["serve"], emulated, options].concat())
}

/// Bytes in which no two slices are equal. The length need not be aligned.
fn data(length: usize) -> Vec<u8> {
    (0..length as u32).flat_map(|word| word.wrapping_mul(2_654_435_761).to_le_bytes()).take(length).collect()
}

/// Memory of this process, on the host backend only: the emulated driver belongs to other processes.
fn memory(bytes: &[u8]) -> Shared {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    let memory = Shared::create(&Device::find(&driver, Selector::default()).unwrap(), Spec::vmm(bytes.len() as u64));
    let memory = memory.unwrap();
    memory.copy_in(0, bytes).unwrap();
    memory
}

/// The lines of a table, less its spaces.
fn lines(ended: &Ended) -> Vec<String> {
    ended.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}
