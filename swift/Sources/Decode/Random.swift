import Foundation

/// numpy's Philox4x64-10 generator with its ziggurat for exponential variables, bit for bit.
///
/// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; Marsaglia and Tsang, "The ziggurat method for
/// generating random variables", 2000.
struct Philox {
    private let seed: UInt64
    private let stream: UInt64
    private var index: UInt64 = 0
    private var blocks: UInt64 = 0
    /// The next numbers. Many blocks are computed at a time: they do not depend on each other, so their products
    /// overlap.
    private var words = [UInt64](repeating: 0, count: 256)
    /// A bit for each of the 64 blocks: 0 if each of the block's numbers is an exponential variable by itself.
    private var outliers: UInt64 = 0
    private var used = 256
    // Here, since a static property is locked at each access.
    private let widths = Ziggurat.widths
    private let inside = Ziggurat.inside
    private let heights = Ziggurat.heights

    /// - Parameters:
    ///   - seed: of the request.
    ///   - stream: streams are independent of each other.
    ///   - index: of the token in the text.
    init(seed: UInt64, stream: UInt64, index: UInt64 = 0) {
        self.seed = seed
        self.stream = stream
        restart(index)
    }

    /// Begin the numbers of the index-th token.
    mutating func restart(_ index: UInt64) {
        self.index = index
        blocks = 0
        used = words.count
    }

    mutating func next() -> UInt64 {
        if used == words.count { refill() }
        used += 1
        return words[used - 1]
    }

    private mutating func refill() {
        outliers = Self.fill(&words, inside, seed, (blocks, 0, stream, index))
        blocks &+= 64
        used = 0
    }

    /// Compute the 64 blocks after a counter; return which have a number that is no exponential variable by itself.
    @inline(never)
    private static func fill(
        _ words: inout [UInt64], _ inside: [UInt64], _ seed: UInt64, _ counter: (UInt64, UInt64, UInt64, UInt64)
    ) -> UInt64 {
        words.withUnsafeMutableBufferPointer { words in
            inside.withUnsafeBufferPointer { inside in
                // Numbers are below 2^53, so the first bit of a difference says which is less.
                func below(_ word: UInt64) -> UInt64 { (word >> 11) &- inside[Int(word >> 3 & 0xFF)] }
                var next = counter
                var outliers: UInt64 = 0
                for block in 0..<64 {
                    next.0 &+= 1  // before the block, as in numpy; a carry never reaches the other words
                    let c = rounds(next, seed)
                    let place = block &* 4
                    (words[place], words[place &+ 1], words[place &+ 2], words[place &+ 3]) = c
                    let all = below(c.0) & below(c.1) & below(c.2) & below(c.3)
                    outliers = outliers >> 1 | (~all & 1 << 63)  // block 0 ends in the last bit
                }
                return outliers
            }
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

    /// Return an exponential variable of mean 1.
    mutating func exponential() -> Double {
        let bits = next() >> 3
        let layer = Int(bits & 0xFF)
        let x = Double(bits >> 8) * widths[layer]
        return bits >> 8 < inside[layer] ? x : outside(layer, x)
    }

    /// Pass over `count` exponential variables.
    ///
    /// All but one in a hundred take a single number: whole blocks are passed over, and no number becomes a variable.
    mutating func skip(_ count: Int) {
        var left = count
        while left > 0 {
            if used == words.count { refill() }
            let block = used >> 2
            let plain = used & 3 == 0 ? min((outliers >> UInt64(block)).trailingZeroBitCount, 64 - block, left >> 2) : 0
            if plain > 0 {
                used += 4 * plain
                left -= 4 * plain
            } else {
                let bits = words[used] >> 3
                let layer = Int(bits & 0xFF)
                used += 1
                left -= 1
                if bits >> 8 >= inside[layer] { _ = outside(layer, Double(bits >> 8) * widths[layer]) }
            }
        }
    }

    /// Return the variable whose first attempt, `x`, fell outside the layer's rectangle: once in a hundred times.
    @inline(never)
    private mutating func outside(_ layer: Int, _ x: Double) -> Double {
        if layer == 0 { return Ziggurat.tail - log1p(-uniform()) }
        let step = heights[layer - 1] - heights[layer]
        if step * uniform() + heights[layer] < exp(-x) { return x }
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
