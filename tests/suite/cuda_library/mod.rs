//! Finding and loading the CUDA driver library, and handling its results.

use std::error::Error as _;

use vmmfd::{
    error::LoadError,
    internals::{PoolHandle, Pools},
};

use crate::{running::hide_driver, support::prelude::*};

mod calls;
mod loading;
mod search;

const PEER_ACCESS_UNSUPPORTED: u32 = 217;

/// Every symbol that the CUDA backend looks up, by its lookup name.
const SYMBOLS: &str = "
    cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetUuid_v2 cuDeviceGetAttribute
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxSynchronize
    cuStreamSynchronize cuMemGetInfo_v2 cuMemGetAllocationGranularity cuMemCreate cuMemRelease cuMemAddressReserve
    cuMemAddressFree cuMemMap cuMemUnmap cuMemSetAccess cuMemRetainAllocationHandle cuPointerGetAttribute cuMemExportToShareableHandle cuMemImportFromShareableHandle
    cuMemGetAllocationPropertiesFromHandle cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuDeviceCanAccessPeer
    cuMemGetAddressRange_v2 cuMemHostAlloc cuMemFreeHost cuMemAlloc_v2 cuMemFree_v2 cuIpcGetMemHandle
    cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle cuMemPoolCreate cuMemPoolDestroy cuMemPoolExportToShareableHandle
    cuMemPoolImportFromShareableHandle cuMemPoolSetAccess cuMemAllocFromPoolAsync cuMemFreeAsync
    cuMemPoolExportPointer cuMemPoolImportPointer cuMemGetHandleForAddressRange cuMemcpyDtoD_v2 cuModuleLoadData
    cuModuleGetFunction cuModuleUnload cuLaunchKernel cuEventCreate cuEventRecord cuStreamWaitEvent
    cuEventDestroy_v2 cuIpcGetEventHandle cuIpcOpenEventHandle
";

/// A pool, its import, and an exported pointer to a buffer.
fn exported_pointer(pools: &dyn Pools) -> (PoolHandle, PoolHandle, [u8; 64]) {
    let pool = pools.create(0).unwrap();
    let imported = pools.import(pools.export(pool).unwrap().as_fd()).unwrap();
    let address = pools.allocate(pool, 0, 1).unwrap();
    (pool, imported, pools.export_pointer(0, address).unwrap())
}

fn loaded(copy: Copy) -> (Fake, CudaDriver) {
    let fake = copy.load();
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    (fake, driver)
}

fn two_devices() -> (Fake, CudaDriver) {
    let fake = Copy::new().load();
    fake.set("FAKECUDA_DEVICES", "2");
    let driver = CudaDriver::load_from(fake.path()).unwrap();
    (fake, driver)
}
