//! Cases for several backends: each case is a function of its subject.

/// Turns cases into tests in the modules `host`, `fake` (the CUDA backend on the emulated driver) and `cuda` (on this machine's GPU
/// driver). `$on` has a constructor for each of these names. The middle list is for cases whose result does not depend on the driver.
macro_rules! cases {
    (
        on $on:ty;
        $(every backend: [$($every:ident,)*])?
        $(host and cuda: [$($case:ident,)*])?
        $(gpus alone: [$($gpu:ident,)*])?
    ) => {
        mod host {
            $($(#[test] fn $every() { super::$every(<$on>::host()); })*)?
            $($(#[test] fn $case() { super::$case(<$on>::host()); })*)?
        }
        mod fake {
            $($(#[test] fn $every() { super::$every(<$on>::fake()); })*)?
            $($(#[test] fn $gpu() { super::$gpu(<$on>::fake()); })*)?
        }
        mod cuda {
            $($(
                #[test]
                #[ignore = "needs an NVIDIA GPU: make test-gpu"]
                fn $every() { super::$every(<$on>::cuda()); }
            )*)?
            $($(
                #[test]
                #[ignore = "needs an NVIDIA GPU: make test-gpu"]
                fn $case() { super::$case(<$on>::cuda()); }
            )*)?
            $($(
                #[test]
                #[ignore = "needs an NVIDIA GPU: make test-gpu"]
                fn $gpu() { super::$gpu(<$on>::cuda()); }
            )*)?
        }
    };
}
