import Foundation

/// The logits of one token, fp32, in memory that is used again for the next.
struct Row {
    /// Numbers of a block. A block keeps 16 maxima, one for each place modulo 16.
    private static let block = 1024

    /// The logits, and -infinity up to the end of the last block.
    private var values: [Float]
    private var maxima: [SIMD16<Float>]
    private let count: Int
    /// The largest logit.
    private(set) var highest = -Float.infinity

    init(_ count: Int) {
        self.count = count
        let blocks = (count + Self.block - 1) / Self.block
        values = [Float](repeating: -.infinity, count: blocks * Self.block)
        maxima = [SIMD16<Float>](repeating: .init(repeating: -.infinity), count: blocks)
    }

    subscript(token: Int) -> Float {
        get { values[token] }
        set { values[token] = newValue }
    }

    /// Return the largest logit of four tokens; beyond the last token there is -infinity.
    func highest(from token: Int) -> Float {
        max(max(values[token], values[token + 1]), max(values[token + 2], values[token + 3]))
    }

    /// Take the logits after token t.
    mutating func fill(_ logits: Logits, _ t: Int) throws {
        guard logits.vocab == count else { throw ShardmillError(.program, "a pass gave \(logits.vocab) logits") }
        try values.withUnsafeMutableBufferPointer { if let row = $0.baseAddress { try logits.write(t, to: row) } }
    }

    /// Find the maxima, after the last change.
    mutating func summarise() {
        values.withUnsafeBytes { raw in
            for block in maxima.indices {
                var high = SIMD16<Float>(repeating: -.infinity)
                for place in stride(from: block * Self.block, to: (block + 1) * Self.block, by: 16) {
                    let next = raw.loadUnaligned(fromByteOffset: 4 &* place, as: SIMD16<Float>.self)
                    high.replace(with: next, where: next .> high)
                }
                maxima[block] = high
            }
        }
        highest = maxima.reduce(-.infinity) { max($0, $1.max()) }
    }

    /// Return a number that at least `rank` logits reach, and not many more; nil if there are too few blocks to tell.
    func bound(_ rank: Int) -> Float? {
        if rank > 4 * maxima.count { return nil }
        let size = max(1, 2 * maxima.count / rank)  // of groups of blocks: few are sorted faster
        var highest: [Float] = []
        for start in stride(from: 0, to: maxima.count, by: size) {
            var high = maxima[start]
            for next in maxima[start..<min(start + size, maxima.count)] {
                high.replace(with: next, where: next .> high)
            }
            for lane in 0..<16 { highest.append(high[lane]) }
        }
        return highest.sorted(by: >)[rank - 1]
    }

    /// Return the tokens whose logits reach a threshold; nil if they are more than `most`.
    func tokens(from threshold: Float, most: Int) -> [Int]? {
        var found: [Int] = []
        for (block, high) in maxima.enumerated() {
            for lane in 0..<16 where high[lane] >= threshold {
                for place in stride(from: block * Self.block + lane, to: (block + 1) * Self.block, by: 16)
                where values[place] >= threshold && place < count {
                    if found.count == most { return nil }
                    found.append(place)
                }
            }
        }
        return found
    }

    /// Return the sum of the powers exp((logit - highest) / temperature), and of those of logits below a threshold.
    ///
    /// The powers are fp32, with a relative error below 1e-5, and so are the sums: only numbers of a block are added in
    /// fp32.
    func powers(_ temperature: Double, below threshold: Float) -> (total: Double, below: Double) {
        // All operands are vectors: operators of a vector and a number work on one lane after the other.
        func all(_ number: Float) -> SIMD8<Float> { SIMD8(repeating: number) }
        let most = all(highest)
        let factor = all(Float(1.4426950408889634 / temperature))  // a power of 2, then
        let (zero, threshold) = (all(0), all(threshold))
        var (total, below) = (0.0, 0.0)
        values.withUnsafeBytes { raw in
            for block in maxima.indices {
                var (sum, low) = (zero, zero)
                for place in stride(from: block * Self.block, to: (block + 1) * Self.block, by: 8) {
                    let logit = raw.loadUnaligned(fromByteOffset: 4 &* place, as: SIMD8<Float>.self)
                    let power = powerOfTwo((logit - most) * factor)
                    sum += power
                    low += power.replacing(with: zero, where: logit .>= threshold)
                }
                total += Double(sum.sum())
                below += Double(low.sum())
            }
        }
        return (total, below)
    }
}

/// Return 2^x for numbers that are not positive; numbers below -125 count as -125.
///
/// The integer next to x becomes the exponent; the power of the rest is a polynomial with a relative error of 2.6e-6.
@inline(__always)
private func powerOfTwo(_ x: SIMD8<Float>) -> SIMD8<Float> {
    func all(_ number: Float) -> SIMD8<Float> { SIMD8(repeating: number) }
    let y = x.replacing(with: all(-125), where: all(-125) .> x)
    let shifted = y + all(0x1.8p23)  // the integer is in the last bits
    let rest = y - (shifted - all(0x1.8p23))
    var value = rest * all(0.0095701) + all(0.05591786)
    value = value * rest + all(0.24024745)
    value = value * rest + all(0.69312181)
    value = value * rest + all(0.99999926)
    let exponent = unsafeBitCast(shifted, to: SIMD8<UInt32>.self) &<< SIMD8<UInt32>(repeating: 23)
    return unsafeBitCast(unsafeBitCast(value, to: SIMD8<UInt32>.self) &+ exponent, to: SIMD8<Float>.self)
}
