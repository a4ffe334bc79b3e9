//! The broker that a client uses if no path is given.

use crate::support::prelude::*;

/// A command whose `XDG_RUNTIME_DIR` is the test's folder, with this system socket.
fn command(place: &Meeting, system: &Path, arguments: &[&str]) -> Run {
    let mut run = place.bare("vmmfd");
    run.command.args(arguments).env("XDG_RUNTIME_DIR", place.folder()).env("VMMFD_SYSTEM_SOCKET", system);
    run
}

/// A broker with a single object, which has this name.
fn serve(place: &Meeting, socket: &Path, name: &str) -> Running {
    let socket = socket.to_str().unwrap();
    let mut server = command(place, Path::new("/nonexistent"), &["serve", "--socket", socket]).start();
    server.until("listening");
    let file = place.folder().join("input");
    fs::write(&file, "data").unwrap();
    let put = ["put", name, "--backend", "host", "--from", file.to_str().unwrap(), "--socket", socket];
    command(place, Path::new("/nonexistent"), &put).end().code(0);
    fs::remove_file(file).unwrap();
    server
}

fn stop(server: Running) {
    server.signal(Signal::SIGTERM);
    server.end().code(0);
}

#[test]
fn client_finds_the_nearest_broker() {
    let (user, machine) = (Meeting::host(), Meeting::host());
    let system = machine.folder().join("system.sock");
    let own = user.folder().join("vmmfd/broker.sock");
    let ls = || command(&user, &system, &["ls", "--json"]).end();
    let names = || -> Vec<String> {
        let listed = ls().code(0).json();
        let objects = listed["objects"].as_array().unwrap();
        objects.iter().map(|object: &Value| object["name"].as_str().unwrap().to_owned()).collect()
    };
    let own_path = own.to_str().unwrap();
    let system_path = system.to_str().unwrap();
    ls().code(4).says(&format!("no broker on {own_path} within 1s, and there is no {system_path}"));
    // A client creates no folder for a missing broker.
    assert!(user.files().is_empty(), "{:?}", user.files());

    let of_machine = serve(&machine, &system, "of-machine");
    assert_eq!(names(), ["of-machine"]);
    fs::create_dir(own.parent().unwrap()).unwrap();
    let of_user = serve(&user, &own, "of-user");
    assert_eq!(names(), ["of-user"]);
    let named = command(&user, &system, &["ls"]).env("VMMFD_BROKER_SOCKET", &system).end();
    assert_eq!(named.code(0).stdout, "of-machine\n");
    stop(of_user);
    // A stale socket, as a killed process leaves it: nothing listens on it.
    drop(UnixListener::bind(&own).unwrap());
    assert_eq!(names(), ["of-machine"]);
    stop(of_machine);
    drop(UnixListener::bind(&system).unwrap());
    ls().code(4).says(&format!("no broker on {system_path} within 1s, and no process listens on {own_path}"));
}

/// Tests with two users.
mod root {
    use std::os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    };

    use super::*;

    const OTHER: u32 = 54_321;

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn inaccessible_folder_is_named() {
        let mut place = Meeting::host();
        fs::set_permissions(place.folder(), PermissionsExt::from_mode(0o755)).unwrap();
        place.copy_binaries();
        let (closed, runtime) = (place.folder().join("closed"), place.folder().join("runtime"));
        for folder in [&closed, &closed.join("inner"), &runtime, &runtime.join("vmmfd")] {
            fs::create_dir(folder).unwrap();
        }
        fs::set_permissions(&closed, PermissionsExt::from_mode(0o700)).unwrap();
        for folder in [&runtime, &runtime.join("vmmfd")] {
            chown(folder, Some(OTHER), Some(OTHER)).unwrap();
        }
        let as_other = |system: &Path, arguments: &[&str]| {
            let mut run = command(&place, system, arguments).env("XDG_RUNTIME_DIR", &runtime);
            run.command.uid(OTHER).gid(OTHER);
            run.end()
        };
        for socket in [closed.join("a.sock"), closed.join("inner/a.sock")] {
            let words = format!(
                "{} can't be reached: this user may not enter the folder {}",
                socket.display(),
                closed.display()
            );
            let ended = as_other(Path::new("/nonexistent"), &["ls", "--socket", socket.to_str().unwrap()]);
            ended.code(4).says(&words).says("hint: the folder's owner must let this user in");
            let ended = as_other(&socket, &["ls"]);
            ended
                .code(4)
                .says("no broker on")
                .says(&format!("this user may not enter the folder of {}", socket.display()));
        }
        // A socket for one user: the server must allow this user.
        let socket = place.folder().join("root.sock");
        let server = serve(&place, &socket, "a");
        let ended = as_other(&socket, &["ls"]);
        ended.code(4).says("does not let this user connect").says("must be started with --allow-uid");
        stop(server);
        // A socket for a group: its members may connect.
        let socket = place.folder().join("group.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        fs::set_permissions(&socket, PermissionsExt::from_mode(0o660)).unwrap();
        let ended = as_other(&socket, &["ls", "--timeout", "1s"]);
        ended
            .code(4)
            .says("the socket is for the group root")
            .says("hint: add this user to that group and log in again");
    }
}
