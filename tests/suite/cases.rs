//! Cases for several backends: each case is a function of its subject.

/// Turns cases into tests in the modules `host`, `fake` (the CUDA backend on the emulated driver) and `cuda` (on this machine's GPU
/// driver). `$on` has a constructor for each of these names.
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
