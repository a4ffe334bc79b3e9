//! A program with an embedded broker, whose objects outlive the program: `embedded_broker SOCKET VMMFD`, with the path of the `vmmfd`
//! program.
//!
//! It serves until its standard input closes. Kill it and start it again: it has the same objects.

use std::{io::Read, path::Path, process::ExitCode, thread};

use vmmfd::{
    broker::{KeeperPath, Server, ServerConfig},
    channel::{Cancel, CancelReason},
};

fn serve(socket: &Path, vmmfd: &Path) -> vmmfd::Result<()> {
    let mut config = ServerConfig::default();
    config.keeper = Some(KeeperPath::Program(vmmfd.to_owned()));
    let cancel = Cancel::new()?;
    let server = Server::bind(socket, config, &cancel)?;
    println!("embedded_broker: listens on {}", server.path().display());
    thread::spawn(move || {
        // An error stops it too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        cancel.cancel(CancelReason::Program);
    });
    let report = server.run()?;
    println!("embedded_broker: ends with {} objects", report.objects);
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [socket, vmmfd] = arguments.as_slice() else {
        eprintln!("usage: embedded_broker SOCKET VMMFD");
        return ExitCode::from(2);
    };
    match serve(socket.as_ref(), vmmfd.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("embedded_broker: {}", error.in_full());
            ExitCode::FAILURE
        }
    }
}
