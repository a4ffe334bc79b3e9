use vmmfd::{
    driver::{Access, Access::ReadWrite},
    internals::{Granularity, Handle, Location, Properties, Verbs},
};

const DEVICE: Location = Location::Device(0);

/// Memory that is mapped, and that device 0 may read and write. A test gives it back itself, as that may fail too.
pub(crate) struct Mapped<'a> {
    pub(crate) driver: &'a dyn Verbs,
    pub(crate) handle: Handle,
    pub(crate) address: u64,
    pub(crate) size: u64,
}

impl<'a> Mapped<'a> {
    /// New memory of so many times its granularity.
    pub(crate) fn new(driver: &'a dyn Verbs, properties: &Properties, units: u64) -> Self {
        let size = units * driver.granularity(properties, Granularity::Minimum).unwrap();
        Self::of(driver, driver.create(size, properties).unwrap(), size)
    }

    /// Memory that there is, of this size in bytes.
    pub(crate) fn of(driver: &'a dyn Verbs, handle: Handle, size: u64) -> Self {
        let address = driver.reserve(size, 0).unwrap();
        driver.map(address, size, 0, handle).unwrap();
        let mapped = Self { driver, handle, address, size };
        mapped.allow(Some(ReadWrite));
        mapped
    }

    /// What device 0 may do with it from now on.
    pub(crate) fn allow(&self, access: Option<Access>) {
        self.driver.set_access(self.address, self.size, DEVICE, access).unwrap();
    }

    /// The same, which another location may read and write as well.
    pub(crate) fn with_access(self, location: Location) -> Self {
        self.driver.set_access(self.address, self.size, location, Some(ReadWrite)).unwrap();
        self
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        self.driver.copy_in(0, self.address + offset, bytes).unwrap();
    }

    pub(crate) fn read<const LENGTH: usize>(&self, offset: u64) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        self.driver.copy_out(0, self.address + offset, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn end(self) {
        self.driver.unmap(self.address, self.size).unwrap();
        self.driver.free(self.address, self.size).unwrap();
        self.driver.release(self.handle).unwrap();
    }
}
