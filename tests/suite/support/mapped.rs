use vmmfd::{
    driver::{Access, Access::ReadWrite},
    internals::{Granularity, Handle, Location, Properties, Verbs},
};

const DEVICE: Location = Location::Device(0);

/// Mapped memory that device 0 can read and write. A test unmaps and releases it explicitly, as these calls can fail too.
pub(crate) struct Mapped<'a> {
    pub(crate) driver: &'a dyn Verbs,
    pub(crate) handle: Handle,
    pub(crate) address: u64,
    pub(crate) size: u64,
}

impl<'a> Mapped<'a> {
    /// Creates memory of `units` times the granularity.
    pub(crate) fn new(driver: &'a dyn Verbs, properties: &Properties, units: u64) -> Self {
        let size = units * driver.granularity(properties, Granularity::Minimum).unwrap();
        Self::of(driver, driver.create(size, properties).unwrap(), size)
    }

    /// Maps existing memory of `size` bytes.
    pub(crate) fn of(driver: &'a dyn Verbs, handle: Handle, size: u64) -> Self {
        let address = driver.reserve(size, 0).unwrap();
        driver.map(address, size, 0, handle).unwrap();
        let mapped = Self { driver, handle, address, size };
        mapped.allow(Some(ReadWrite));
        mapped
    }

    /// Sets the access of device 0.
    pub(crate) fn allow(&self, access: Option<Access>) {
        self.driver.set_access(self.address, self.size, DEVICE, access).unwrap();
    }

    /// Also allows another location to read and write.
    pub(crate) fn with_access(self, location: Location) -> Self {
        self.driver.set_access(self.address, self.size, location, Some(ReadWrite)).unwrap();
        self
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
