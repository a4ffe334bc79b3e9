//! `vmmfd-bench`: measures handoffs and compares them with the driver's own calls. `vmmfd bench` runs it.

fn main() -> std::process::ExitCode {
    vmmfd_bench::main()
}
