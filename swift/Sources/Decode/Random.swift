import Foundation

/// numpy's Philox4x64-10 generator with its ziggurat for exponential variables, bit for bit.
///
/// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; Marsaglia and Tsang, "The ziggurat method for
/// generating random variables", 2000.
struct Philox {
    private let key: UInt64
    private var counter: (UInt64, UInt64, UInt64, UInt64)
    private var block: (UInt64, UInt64, UInt64, UInt64) = (0, 0, 0, 0)
    private var used = 4

    /// - Parameters:
    ///   - seed: of the request.
    ///   - stream: streams are independent of each other.
    ///   - index: of the token in the text.
    init(seed: UInt64, stream: UInt64, index: UInt64) {
        key = seed
        counter = (0, 0, stream, index)
    }

    @inline(__always)
    mutating func next() -> UInt64 {
        if used == 4 {
            counter.0 &+= 1  // before the block, as numpy does; the other words are never reached by a carry
            block = Self.rounds(counter, key)
            used = 0
        }
        used += 1
        switch used {
        case 1: return block.0
        case 2: return block.1
        case 3: return block.2
        default: return block.3
        }
    }

    @inline(__always)
    private static func rounds(
        _ counter: (UInt64, UInt64, UInt64, UInt64), _ seed: UInt64
    ) -> (UInt64, UInt64, UInt64, UInt64) {
        var c = counter
        var (k0, k1): (UInt64, UInt64) = (seed, 0)
        for _ in 0..<10 {
            let a = c.0.multipliedFullWidth(by: 0xD2E7_470E_E14C_6C93)
            let b = c.2.multipliedFullWidth(by: 0xCA5A_8263_9512_1157)
            c = (b.high ^ c.1 ^ k0, b.low, a.high ^ c.3 ^ k1, a.low)
            k0 &+= 0x9E37_79B9_7F4A_7C15
            k1 &+= 0xBB67_AE85_84CA_A73B
        }
        return c
    }

    /// Return a number in [0, 1).
    mutating func uniform() -> Double { Double(next() >> 11) * 0x1p-53 }

    /// Call `body` with a function that returns exponential variables of mean 1.
    mutating func withExponentials<Result>(_ body: (() -> Double) -> Result) -> Result {
        Ziggurat.widths.withUnsafeBufferPointer { widths in
            Ziggurat.inside.withUnsafeBufferPointer { inside in
                body {
                    let bits = next() >> 3
                    let layer = Int(bits & 0xFF)
                    let x = Double(bits >> 8) * widths[layer]
                    return bits >> 8 < inside[layer] ? x : outside(layer, x)
                }
            }
        }
    }

    /// Return an exponential variable of mean 1.
    mutating func exponential() -> Double { withExponentials { $0() } }

    /// Return the variable whose first attempt, `x`, fell outside the layer's rectangle: once in a hundred times.
    @inline(never)
    private mutating func outside(_ layer: Int, _ x: Double) -> Double {
        if layer == 0 { return Ziggurat.tail - log1p(-uniform()) }
        let step = Ziggurat.heights[layer - 1] - Ziggurat.heights[layer]
        if step * uniform() + Ziggurat.heights[layer] < exp(-x) { return x }
        return exponential()
    }
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
