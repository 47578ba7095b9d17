import Foundation

/// The random numbers of a token: a stream of numpy's Philox4x64-10 generator, bit for bit.
///
/// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. Four numbers are computed at a time, from their
/// place in the stream alone: so those that nobody needs cost nothing.
struct Philox {
    private let seed: UInt64
    private let stream: UInt64
    private let index: UInt64

    /// - Parameters:
    ///   - seed: of the request.
    ///   - stream: streams are independent of each other.
    ///   - index: of the token in the text.
    init(seed: UInt64, stream: UInt64, index: UInt64) {
        self.seed = seed
        self.stream = stream
        self.index = index
    }

    /// Return the block-th four integers of the stream.
    @inline(__always)
    func block(_ block: Int) -> SIMD4<UInt64> {
        // numpy counts before a block; a carry never reaches the other words
        var c = (UInt64(block) &+ 1, UInt64(0), stream, index)
        var (k0, k1): (UInt64, UInt64) = (seed, 0)
        for _ in 0..<10 {
            let a = c.0.multipliedFullWidth(by: 0xD2E7_470E_E14C_6C93)
            let b = c.2.multipliedFullWidth(by: 0xCA5A_8263_9512_1157)
            c = (b.high ^ c.1 ^ k0, b.low, a.high ^ c.3 ^ k1, a.low)
            k0 &+= 0x9E37_79B9_7F4A_7C15
            k1 &+= 0xBB67_AE85_84CA_A73B
        }
        return SIMD4(c.0, c.1, c.2, c.3)
    }

    /// Return the number in [0, 1) at a place of the stream.
    func number(_ place: Int) -> Double { Self.number(block(place >> 2)[place & 3]) }

    /// Return the number in [0, 1) that an integer of the stream gives.
    static func number(_ integer: UInt64) -> Double { Double(integer >> 11) * 0x1p-53 }
}

/// Return the exponential variable of mean 1 that a number in [0, 1) gives: how long a token waits.
///
/// It is at least as large as the number. 1 - number is exact. The last bit of a logarithm differs between libraries,
/// which changes the draw only if two tokens are as near to each other. 2^-54 counts instead of the number 0, whose
/// token would not wait at all and beat any other.
func wait(_ number: Double) -> Double {
    let number = max(number, 0x1p-54)
    return max(-log(1 - number), number)
}

/// Return the sum in numpy's order: pairwise, blocks of 128 by eight running sums.
func pairwiseSum(_ values: UnsafeBufferPointer<Double>) -> Double {
    let count = values.count
    if count < 8 { return values.reduce(0, +) }
    if count > 128 {
        let half = count / 2 - (count / 2) % 8
        return pairwiseSum(.init(rebasing: values[..<half])) + pairwiseSum(.init(rebasing: values[half...]))
    }
    var sums = SIMD8<Double>(repeating: 0)
    let whole = count - count % 8
    for block in stride(from: 0, to: whole, by: 8) {
        var lanes = SIMD8<Double>()
        for lane in 0..<8 { lanes[lane] = values[block + lane] }
        sums = block == 0 ? lanes : sums + lanes
    }
    let total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
    return values[whole...].reduce(total, +)
}
