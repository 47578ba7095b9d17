/// Numbers of half precision (IEEE 754, 16 bits) by their bits.
///
/// Swift has no Float16 on a Mac with an Intel processor, nor for Catalyst there. The package can't run programs there,
/// but an app is often built for both processors, and must compile. Elsewhere an Intel processor has it, but converts
/// by a call for each number.
package enum Half {
    /// Return the number that 16 bits stand for.
    @inlinable
    package static func float(_ bits: UInt16) -> Float {
        #if arch(x86_64)
        return computedFloat(bits)
        #else
        return Float(Float16(bitPattern: bits))
        #endif
    }

    /// Return the bits of the nearest number of half precision; among two the even one.
    @inlinable
    package static func bits(_ value: Float) -> UInt16 {
        #if arch(x86_64) && (os(macOS) || targetEnvironment(macCatalyst))
        return computedBits(value)
        #else
        return Float16(value).bitPattern
        #endif
    }

    /// Move exponent and fraction to their places in a Float: without a branch, so that rows are converted many at a
    /// time.
    @inlinable
    static func computedFloat(_ bits: UInt16) -> Float {
        let magnitude = UInt32(bits & 0x7FFF) << 13
        let infinite: UInt32 = magnitude >= 0x7C00 << 13 ? 0x7F80_0000 : 0
        let value = (Float(bitPattern: magnitude) * 0x1p112).bitPattern
        return Float(bitPattern: value | infinite | UInt32(bits & 0x8000) << 16)
    }

    @usableFromInline
    static func computedBits(_ value: Float) -> UInt16 {
        let sign = UInt16(value.bitPattern >> 16 & 0x8000)
        let magnitude = value.bitPattern & 0x7FFF_FFFF
        if magnitude > 0x7F80_0000 { return sign | 0x7E00 | UInt16(magnitude >> 13 & 0x1FF) }  // not a number
        if magnitude >= 0x477F_F000 { return sign | 0x7C00 }  // from 65520 on it rounds to infinity
        if magnitude < 0x3880_0000 {  // below 2^-14 steps are 2^-24
            return sign | UInt16((Float(bitPattern: magnitude) * 0x1p24).rounded(.toNearestOrEven))
        }
        let rounded = magnitude + 0xFFF + (magnitude >> 13 & 1)
        return sign | UInt16((rounded >> 13) - (112 << 10))
    }
}
