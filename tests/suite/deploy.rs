//! The files of `scripts/deploy/`: they parse, the programs accept their options, and producers and consumers share no more than they need.

use yaml_rust2::{Yaml, YamlLoader};

use crate::{running::understood, support::prelude::*};

fn folder() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("scripts/deploy")
}

#[track_caller]
fn text(name: &str) -> String {
    fs::read_to_string(folder().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[track_caller]
fn documents(name: &str) -> Vec<Yaml> {
    YamlLoader::load_from_str(&text(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn kind<'a>(documents: &'a [Yaml], kind: &str) -> Vec<&'a Yaml> {
    documents.iter().filter(|document| document["kind"].as_str() == Some(kind)).collect()
}

fn list(yaml: &Yaml) -> &[Yaml] {
    yaml.as_vec().map_or(&[], Vec::as_slice)
}

fn words(yaml: &Yaml) -> Vec<String> {
    list(yaml).iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// The pods of a file, including the pod template of a DaemonSet.
fn pods(name: &str) -> Vec<Yaml> {
    let documents = documents(name);
    let sets = kind(&documents, "DaemonSet").into_iter().map(|set| set["spec"]["template"]["spec"].clone());
    kind(&documents, "Pod").into_iter().map(|pod| pod["spec"].clone()).chain(sets).collect()
}

fn containers(pod: &Yaml) -> impl Iterator<Item = &Yaml> {
    list(&pod["initContainers"]).iter().chain(list(&pod["containers"]))
}

/// The services of the compose file. This parser does not resolve the merge key.
fn services() -> Vec<(Yaml, Vec<String>)> {
    let file = documents("compose.yaml").remove(0);
    let services = file["services"].as_hash().unwrap();
    assert_eq!(services.len(), 2);
    services.values().map(|service| (service["<<"].clone(), words(&service["command"]))).collect()
}

#[test]
fn programs_accept_the_deployed_options() {
    let mut ends: Vec<Vec<String>> = services().into_iter().map(|(_, command)| command).collect();
    for pod in ["kubernetes/pod.yaml", "kubernetes/two-pods.yaml"].iter().flat_map(|name| pods(name)) {
        ends.extend(containers(&pod).map(|container| words(&container["args"])));
    }
    assert_eq!(ends.len(), 6);
    let script = text("podman");
    for command in script.lines().filter_map(|line| line.split_once("\"$image\" ").map(|(_, command)| command)) {
        let command = command.split(" >").next().unwrap().split(" ||").next().unwrap();
        ends.push(command.split(' ').map(|word| word.replace("\"$socket\"", "/run/vmmfd/vmmfd.sock")).collect());
    }
    assert_eq!(ends.len(), 8);
    for end in &ends {
        understood("vmmfd", end);
        assert!(end.windows(2).any(|pair| pair == ["--socket", "/run/vmmfd/vmmfd.sock"]), "{end:?}");
        assert!(end.windows(2).any(|pair| pair == ["--backend", "cuda"]), "{end:?}");
    }
    for (role, count) in [("produce", 4), ("consume", 4)] {
        assert_eq!(ends.iter().filter(|end| end[0] == role).count(), count, "{role}");
    }
    let check = node_check();
    let doctor = check.lines().find_map(|line| line.strip_prefix("vmmfd ")?.strip_suffix(" &")).unwrap();
    understood("vmmfd", &doctor.split(' ').map(str::to_owned).collect::<Vec<_>>());
}

/// The script of the container that checks the node.
fn node_check() -> String {
    let pod = pods("kubernetes/node-check.yaml").remove(0);
    let [doctor] = list(&pod["initContainers"]) else { panic!("not one check") };
    assert_eq!(words(&doctor["command"]), ["/bin/sh", "-c"]);
    words(&doctor["args"]).remove(0)
}

#[test]
fn node_check_fails_on_broken_gpus() {
    let check = |meeting: &Meeting, driver: Option<&Path>| -> Run {
        let run = meeting.bare("vmmfd");
        let programs = Path::new(run.command.get_program()).parent().unwrap().to_owned();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &node_check()]).env("TMPDIR", meeting.folder());
        let path = env::join_paths([programs, "/usr/bin".into(), "/bin".into()]).unwrap();
        command.env("PATH", path).env("LD_LIBRARY_PATH", driver.unwrap_or(meeting.folder()));
        run.instead(command)
    };
    let meeting = Meeting::fake();
    let driver = meeting.driver_folder();
    check(&meeting, driver).end().code(0);
    check(&meeting, driver).env("FAKECUDA_FAIL", "cuMemMap:1:999").end().code(1);
    let none = check(&meeting, driver).env("FAKECUDA_DEVICES", "0").end();
    none.code(0);
    assert!(none.stdout.ends_with("no GPU on this node: nothing to check\n"), "{}", none.stdout);
}

mod namespaces {
    use super::*;

    fn children(pid: u32) -> Vec<u32> {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    #[test]
    #[ignore = "needs the right to make namespaces: make test-all runs it where there is"]
    fn server_as_init_reaps_orphans() {
        let meeting = Meeting::host();
        let run = meeting.bare("vmmfd");
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", "/bin/sh", "-c"]);
        // Orphans, for which the shell would wait, but the program takes its place as process 1.
        unshare.arg("for i in 1 2 3 4 5; do (sleep 1 &); done; exec \"$0\" serve --socket \"$1\"");
        let path = meeting.folder().join("init.sock");
        unshare.arg(run.command.get_program()).arg(&path);
        let run = run.instead(unshare).start();
        wait_for("a broker", || path.exists());
        let init = children(run.pid())[0];
        // The shell's children end after a second.
        wait_for("the keeper alone", || children(init).len() == 1);
        let keeper = children(init)[0];
        kill(Pid::from_raw(keeper.cast_signed()), Signal::SIGKILL).unwrap();
        wait_for("another keeper", || matches!(children(init)[..], [pid] if pid != keeper));
        kill(Pid::from_raw(init.cast_signed()), Signal::SIGTERM).unwrap();
        run.end();
    }

    #[test]
    #[ignore = "needs the right to make namespaces: make test-all runs it where there is"]
    fn node_check_ends_at_sigterm() {
        let pod = pods("kubernetes/node-check.yaml").remove(0);
        let [checked] = list(&pod["containers"]) else { panic!("not one container") };
        let command = words(&checked["command"]);
        assert_eq!(command[..2], ["/bin/sh", "-c"]);
        let meeting = Meeting::host();
        // A doctor that hangs in the driver.
        let doctor = meeting.folder().join("vmmfd");
        fs::write(&doctor, "#!/bin/sh\nexec sleep infinity\n").unwrap();
        fs::set_permissions(&doctor, fs::Permissions::from_mode(0o755)).unwrap();
        for script in [&node_check(), &command[2]] {
            let mut unshare = Command::new("unshare");
            unshare.args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", script]);
            unshare.env("PATH", format!("{}:/usr/bin:/bin", meeting.folder().display()));
            let run = meeting.bare("vmmfd").instead(unshare).start();
            // unshare, the shell as process 1, and the shell's child.
            let child = |pid: u32| children(pid).first().copied();
            // Before it executes a program, the child has the shell's handler: a signal does not end it.
            let sleeps = |pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n");
            let shell = || child(run.pid()).filter(|shell| child(*shell).is_some_and(sleeps));
            wait_for("the shell's child", || shell().is_some());
            kill(Pid::from_raw(shell().unwrap() as i32), Signal::SIGTERM).unwrap();
            run.end();
        }
    }
}

#[test]
fn broker_pods_run_accepted_commands() {
    let pod = &pods("kubernetes/broker.yaml")[0];
    for container in containers(pod) {
        assert!(container["livenessProbe"].is_badvalue(), "a probe that is late would take the memory with it");
        understood("vmmfd", &words(&container["args"]));
        let probe = words(&container["readinessProbe"]["exec"]["command"]);
        if let Some((program, arguments)) = probe.split_first() {
            assert_eq!(program, "vmmfd");
            understood("vmmfd", arguments);
        }
    }
    for address in ["10.1.2.3:9464", "[fd00::1]:9464"] {
        understood("vmmfd", &["exporter", "--listen", address].map(str::to_owned));
    }
    // A client has another user: a process of the broker's user can take the broker's descriptors.
    let reader = &pods("kubernetes/host-broker.yaml")[0];
    let [container] = list(&reader["containers"]) else { panic!("not one container") };
    let arguments = words(&container["args"]);
    understood("vmmfd", &arguments);
    let user = |pod: &Yaml| pod["securityContext"]["runAsUser"].as_i64().unwrap();
    assert_ne!(user(reader), user(pod));
    assert!(arguments.windows(2).any(|pair| pair == ["--allow-uid", &user(pod).to_string()]));
}

/// The settings in a section of a unit, in order.
fn section<'a>(unit: &'a str, name: &str) -> Vec<(&'a str, &'a str)> {
    let (_, after) = unit.split_once(&format!("\n[{name}]\n")).unwrap();
    let lines = after.lines().take_while(|line| !line.starts_with('[')).filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once('=')).collect()
}

/// Asserts that the program accepts the command of a unit with these options.
#[track_caller]
fn runs(command: &str, options: &str) {
    // The package's group may not exist here.
    let words = command.split(' ').map(|word| if word == "vmmfd" { "0" } else { word });
    let words: Vec<String> = words.chain(options.split_whitespace()).map(str::to_owned).collect();
    assert_eq!(words[0], "/usr/bin/vmmfd");
    understood("vmmfd", &words[1..]);
}

#[test]
fn units_are_independent_and_run() {
    // These settings would stop the server when systemd restarts a crashed keeper. The server then holds the only copy of the state.
    const BINDING: [&str; 7] =
        ["Requires", "Requisite", "BindsTo", "PartOf", "Upholds", "PropagatesStopTo", "StopPropagatedFrom"];
    // In a user namespace or with a private /proc, the broker could not identify clients.
    const PRIVATE: [&str; 6] =
        ["PrivateUsers", "ProtectProc", "PrivatePIDs", "User", "DynamicUser", "FileDescriptorStoreMax"];
    for file in ["vmmfd.service", "vmmfd-keeper.service", "vmmfd-exporter.service"] {
        let unit = text(&format!("systemd/{file}"));
        let (dependencies, service) = (section(&unit, "Unit"), section(&unit, "Service"));
        if file != "vmmfd-exporter.service" {
            let mut keys = dependencies.iter().chain(&service).map(|(key, _)| key);
            assert!(!keys.any(|key| BINDING.contains(key) || PRIVATE.contains(key)), "{file}");
        }
        for (_, command) in service.iter().filter(|(key, _)| ["ExecStart", "ExecReload"].contains(key)) {
            let commented = unit.split_once("VMMFD_OPTIONS=\"").map(|(_, rest)| rest.split_once('"').unwrap().0);
            runs(command, commented.filter(|_| command.ends_with("/etc/default/vmmfd")).unwrap_or_default());
        }
    }
    for line in text("systemd/vmmfd.default").lines().filter_map(|line| line.strip_prefix("#VMMFD_OPTIONS=\"")) {
        runs("/usr/bin/vmmfd serve", line.trim_end_matches('"'));
    }
}
