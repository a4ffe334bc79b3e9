//! A mapping as cudarc takes it, next to the same memory as this crate copies it.

#![allow(unsafe_code, reason = "launching a kernel")]

use std::ffi::{CString, c_void};

use cudarc::driver::{CudaContext, DeviceSlice, result, sys};
use vmmfd::{
    Error,
    driver::Access,
    error::MemoryError,
    launch::{View, ViewMut},
    memory::{Allocation, Mapping, Region},
};

use crate::support::Subject;

/// Adds 1 to each of the first `n` words.
const PTX: &str = r"
.version 6.0
.target sm_50
.address_size 64
.visible .entry add_one(.param .u64 words, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %d<4>;
    ld.param.u64 %d0, [words];
    ld.param.u32 %r0, [n];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    setp.ge.u32 %p, %r4, %r0;
    @%p bra DONE;
    cvta.to.global.u64 %d1, %d0;
    mul.wide.u32 %d2, %r4, 4;
    add.s64 %d3, %d1, %d2;
    ld.global.u32 %r5, [%d3];
    add.u32 %r5, %r5, 1;
    st.global.u32 [%d3], %r5;
DONE:
    ret;
}
";

mod cuda {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU: make test-gpu"]
    fn streams_and_kernels_of_cudarc_work_on_a_mapping() {
        let subject = Subject::cuda();
        let device = subject.device();
        let allocation = Allocation::create(&device, 1 << 20).unwrap();
        let (mapping, other) = (
            Mapping::new(&allocation, Access::ReadWrite).unwrap(),
            Mapping::new(&allocation, Access::ReadOnly).unwrap(),
        );
        mapping.copy_in(0, &[0xAA; 4096]).unwrap();
        let context = CudaContext::new(device.ordinal() as usize).unwrap();
        let stream = context.default_stream();

        let mut view = ViewMut::<u32>::new(&mapping, &stream, 1000).unwrap();
        assert_eq!((view.len(), view.num_bytes()), (1000, 4000));
        stream.memset_zeros(&mut view).unwrap();
        stream.memcpy_htod(&(0..1000).collect::<Vec<u32>>(), &mut view).unwrap();

        let kernel_arguments: (u64, u32) = (view.address(), 1000);
        let source = CString::new(PTX).unwrap();
        // SAFETY: the module outlives the launch, the kernel takes a pointer and a count, and the mapping has as many words.
        unsafe {
            let module = result::module::load_data(source.as_ptr().cast()).unwrap();
            let kernel = result::module::get_function(module, CString::new("add_one").unwrap()).unwrap();
            let mut arguments = [
                (&raw const kernel_arguments.0).cast_mut().cast::<c_void>(),
                (&raw const kernel_arguments.1).cast_mut().cast::<c_void>(),
            ];
            result::launch_kernel(kernel, (8, 1, 1), (128, 1, 1), 0, stream.cu_stream(), &mut arguments).unwrap();
            stream.synchronize().unwrap();
            result::module::unload(module).unwrap();
        }

        let mut words = vec![0u32; 1000];
        let reader = View::<u32>::new(&other, &stream, 1000).unwrap();
        stream.memcpy_dtoh(&reader, &mut words).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(words, (1..=1000).collect::<Vec<u32>>());
        let mut bytes = [0; 4096];
        other.copy_out(0, &mut bytes).unwrap();
        assert_eq!((&bytes[..8], &bytes[4000..4004]), (&[1, 0, 0, 0, 2, 0, 0, 0][..], &[0xAA; 4][..]));

        let refused = ViewMut::<u32>::new(&other, &stream, 1).unwrap_err();
        assert!(matches!(refused, Error::Memory(MemoryError::ReadOnly)), "{refused}");
        let length = mapping.size() as usize / 4;
        assert!(View::<u32>::new(&mapping, &stream, length).is_ok());
        for too_many in [length + 1, usize::MAX] {
            assert!(matches!(
                View::<u32>::new(&mapping, &stream, too_many),
                Err(Error::Memory(MemoryError::OutOfRange { .. }))
            ));
        }
        let _: sys::CUdeviceptr = reader.address();
    }
}
