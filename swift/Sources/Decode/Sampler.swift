import Foundation

/// How tokens are chosen; the defaults are greedy and change nothing.
public struct Sampling: Equatable, Sendable {
    /// Divides the logits; 0 chooses the likeliest token.
    public var temperature = 0.0
    /// Keep the k likeliest tokens; 0 keeps all.
    public var topK = 0
    /// Keep the smallest set of likeliest tokens whose mass reaches this.
    public var topP = 1.0
    /// Keep tokens at least this many times as likely as the likeliest.
    public var minP = 0.0
    /// Divides positive and multiplies negative logits of tokens already in the text.
    public var repetitionPenalty = 1.0
    /// The same seed gives the same tokens, with drafts or without.
    public var seed: UInt64 = 0
    /// Token -> value added to its logit.
    public var logitBias: [Int: Double] = [:]

    public init() {}

    /// Throw if a value is out of its range.
    public func check(vocab: Int) throws {
        let checks = [
            (temperature >= 0 && temperature.isFinite, "temperature must be at least 0 and finite"),
            (topK >= 0, "topK must be at least 0"),
            (topP > 0 && topP <= 1, "topP must be in (0, 1]"),
            (minP >= 0 && minP <= 1, "minP must be in [0, 1]"),
            ((0.001...1000).contains(repetitionPenalty), "repetitionPenalty must be in [0.001, 1000]"),
            (logitBias.allSatisfy { (0..<vocab).contains($0.key) && $0.value.isFinite }, "logitBias names a token that the vocabulary lacks"),
        ]
        for (good, reason) in checks where !good { throw ShardmillError(.request, reason) }
    }
}

/// The state of a request's sampling: the tokens in the text, and the number chosen.
///
/// The filters and their order are those of shardmill's Python runtime, and so are the random numbers: each token is
/// drawn by a race of exponential variables, numpy's Philox generator keyed by the seed with the token's index as counter.
struct Sampler {
    private let sampling: Sampling
    private var seen: [Bool]
    private var scores: [Double]
    private var index: UInt64 = 0

    init(_ sampling: Sampling, prompt: [Int], vocab: Int) {
        self.sampling = sampling
        seen = [Bool](repeating: false, count: vocab)
        for token in prompt { seen[token] = true }
        scores = []
    }

    private var plain: Bool {
        sampling.temperature == 0 && sampling.logitBias.isEmpty && sampling.repetitionPenalty == 1
    }

    /// Choose the next token from the logits after token t.
    mutating func next(_ logits: Logits, _ t: Int) -> Int {
        let token: Int
        if plain {
            token = logits.argmax(t)
        } else {
            adjust(logits, t)
            token = sampling.temperature == 0 ? argmax(scores) : race().token
        }
        seen[token] = true
        index += 1
        return token
    }

    /// Choose the next token after a proposal that was not drawn at random: it does not influence the choice.
    mutating func check(_ logits: Logits, _ t: Int, drafted: Int) -> Int { next(logits, t) }

    /// Return the least change of a logit that could change the next token.
    mutating func margin(_ logits: Logits, _ t: Int) -> Double {
        adjust(logits, t)
        if sampling.temperature > 0 {
            let (_, first, second) = race()
            return log(first) * sampling.temperature - log(second) * sampling.temperature
        }
        var (first, second) = (-Double.infinity, -Double.infinity)
        for score in scores {
            if score > first { (first, second) = (score, first) } else if score > second { second = score }
        }
        return first - second
    }

    /// Fill `scores` with logits after bias and repetition penalty.
    private mutating func adjust(_ logits: Logits, _ t: Int) {
        let vocab = logits.vocab
        if scores.count != vocab { scores = [Double](repeating: 0, count: vocab) }
        scores.withUnsafeMutableBufferPointer { logits.write(t, into: $0) }
        for (token, bias) in sampling.logitBias { scores[token] += bias }
        let penalty = sampling.repetitionPenalty
        if penalty != 1 {
            for v in 0..<vocab where seen[v] { scores[v] = scores[v] > 0 ? scores[v] / penalty : scores[v] * penalty }
        }
    }

    /// Return the token that wins the race, its speed and that of the second. `scores` become the probabilities.
    ///
    /// A token's speed is its probability by an exponential variable; a token of probability 0 only passes its turn.
    private mutating func race() -> (token: Int, first: Double, second: Double) {
        toProbabilities(&scores, sampling)
        var random = Philox(seed: sampling.seed, stream: 2, index: index)
        return scores.withUnsafeBufferPointer { scores in
            random.withExponentials { next in
                var (token, first, second) = (0, 0.0, 0.0)
                let last = scores.lastIndex { $0 > 0 } ?? 0
                for v in 0...last {
                    let wait = next()
                    if scores[v] == 0 { continue }
                    let speed = scores[v] / max(wait, Double.leastNormalMagnitude)
                    if speed > first { (token, first, second) = (v, speed, first) } else if speed > second { second = speed }
                }
                return (token, first, second)
            }
        }
    }
}

func argmax(_ values: [Double]) -> Int {
    values.withUnsafeBufferPointer { values in
        var best = 0
        for place in values.indices where values[place] > values[best] { best = place }
        return best
    }
}

/// Turn adjusted logits into the distribution after temperature and filters.
func toProbabilities(_ values: inout [Double], _ sampling: Sampling) {
    values.withUnsafeMutableBufferPointer { values in
        var highest = -Double.infinity
        for v in values.indices where values[v] > highest { highest = values[v] }
        for v in values.indices { values[v] = exp((values[v] - highest) / sampling.temperature) }
        scale(values)
        if sampling.topK > 0 && sampling.topK < values.count {
            keep(values, from: leastOf(sampling.topK, values), count: sampling.topK)
        }
        if sampling.topP < 1 {
            let (least, count) = nucleus(values, sampling.topP)
            keep(values, from: least, count: count)
        }
        if sampling.minP > 0 {
            let least = sampling.minP * (values.max() ?? 0)
            for v in values.indices where values[v] < least { values[v] = 0 }
            scale(values)
        }
    }
}

private typealias Values = UnsafeMutableBufferPointer<Double>

private func scale(_ values: Values) {
    let total = pairwiseSum(UnsafeBufferPointer(values))
    for v in values.indices { values[v] /= total }
}

/// Keep the `count` largest values, whose smallest is `least`; among equals the first.
private func keep(_ values: Values, from least: Double, count: Int) {
    var larger = 0
    for v in values.indices where values[v] > least { larger += 1 }
    var equals = count - larger
    for v in values.indices where values[v] <= least {
        if values[v] == least && equals > 0 { equals -= 1 } else { values[v] = 0 }
    }
    scale(values)
}

/// Values in bins by their leading bits, the largest in bin 0: to sort a large vocabulary takes tens of milliseconds.
///
/// 64 bins for each power of two; the least likely tokens share a bin.
private struct Bins {
    static let (count, trailing) = (4096, UInt64(46))
    private let highest: Int

    init(_ values: Values) {
        var largest = 0.0
        for v in values.indices where values[v] > largest { largest = values[v] }
        highest = Int(largest.bitPattern >> Self.trailing)
    }

    /// Return a value's bin. The bits of positive numbers are ordered as the numbers are.
    func bin(_ value: Double) -> Int {
        min(max(0, highest - Int(value.bitPattern >> Self.trailing)), Self.count - 1)  // NaN lies above all numbers
    }

    /// Return the values of a bin, the largest first.
    func sorted(_ values: Values, _ bin: Int) -> [Double] { values.filter { self.bin($0) == bin }.sorted(by: >) }
}

/// Return the `count`-th largest value.
private func leastOf(_ count: Int, _ values: Values) -> Double {
    let bins = Bins(values)
    var counts = [Int](repeating: 0, count: Bins.count)
    for value in values { counts[bins.bin(value)] += 1 }
    var (last, before) = (0, 0)
    while before + counts[last] < count { (last, before) = (last + 1, before + counts[last]) }
    return bins.sorted(values, last)[count - before - 1]
}

/// Return the smallest of the likeliest values whose sum reaches `mass`, and their number.
private func nucleus(_ values: Values, _ mass: Double) -> (least: Double, count: Int) {
    let rounding = 1e-9  // far larger than the rounding error of a sum of probabilities
    let bins = Bins(values)
    var masses = [Double](repeating: 0, count: Bins.count)
    var counts = [Int](repeating: 0, count: Bins.count)
    for value in values {
        let bin = bins.bin(value)
        masses[bin] += value
        counts[bin] += 1
    }
    var (last, sum, count) = (0, 0.0, 0)
    while last < Bins.count - 1 && sum + masses[last] < mass {
        (last, sum, count) = (last + 1, sum + masses[last], count + counts[last])
    }
    let found = reached(bins.sorted(values, last), mass, sum)
    if found.nearest >= rounding { return (found.least, count + found.count) }
    let exact = reached(values.sorted(by: >), mass, 0)  // the order of the additions decides
    return (exact.least, exact.count)
}

/// Add sorted values to a sum until it reaches `mass`; return the last, their number, and how near any sum came.
private func reached(_ sorted: [Double], _ mass: Double, _ start: Double) -> (least: Double, count: Int, nearest: Double) {
    var (sum, count, nearest) = (start, 0, abs(start - mass))
    for value in sorted {
        sum += value
        count += 1
        nearest = min(nearest, abs(sum - mass))
        if sum >= mass { break }
    }
    return (count == 0 ? 0 : sorted[count - 1], count, nearest)
}
