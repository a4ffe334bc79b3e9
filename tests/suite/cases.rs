//! Cases that hold on several backends, each a function of what it is to run on.

/// Makes tests of cases, in the modules `host`, `fake` (the CUDA backend over the emulated driver) and `cuda` (over the driver
/// of this machine's GPU). `$on` has a function of each of these names.
macro_rules! cases {
    (on $on:ty; every backend: [$($case:ident,)*]) => {
        cases! { on $on; every backend: [$($case,)*] gpus alone: [] }
    };
    (on $on:ty; every backend: [$($case:ident,)*] gpus alone: [$($gpu_case:ident,)*]) => {
        mod host {
            $(#[test] fn $case() { super::$case(<$on>::host()); })*
        }
        cases! { on $on; gpus alone: [$($case,)* $($gpu_case,)*] }
    };
    (on $on:ty; gpus alone: [$($case:ident,)*]) => {
        mod fake {
            $(#[test] fn $case() { super::$case(<$on>::fake()); })*
        }
        mod cuda {
            $(
                #[test]
                #[ignore = "needs an NVIDIA GPU: make test-gpu"]
                fn $case() { super::$case(<$on>::cuda()); }
            )*
        }
    };
}
