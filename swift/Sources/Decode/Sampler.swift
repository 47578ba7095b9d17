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
            token = sampling.temperature == 0 ? argmax(scores) : argmax(race())
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
        let ranked = sampling.temperature == 0 ? scores : race().map { log($0) * sampling.temperature }
        var (first, second) = (-Double.infinity, -Double.infinity)
        for score in ranked {
            if score > first { (first, second) = (score, first) } else if score > second { second = score }
        }
        return first - second
    }

    /// Fill `scores` with logits after bias and repetition penalty.
    private mutating func adjust(_ logits: Logits, _ t: Int) {
        let (vocab, tokens) = (logits.vocab, logits.tokens)
        if scores.count != vocab { scores = [Double](repeating: 0, count: vocab) }
        for v in 0..<vocab { scores[v] = Double(logits.values[v * tokens + t]) }
        for (token, bias) in sampling.logitBias { scores[token] += bias }
        let penalty = sampling.repetitionPenalty
        if penalty != 1 {
            for v in 0..<vocab where seen[v] { scores[v] = scores[v] > 0 ? scores[v] / penalty : scores[v] * penalty }
        }
    }

    /// Return how fast each token is; the fastest is drawn. `scores` become the probabilities.
    private mutating func race() -> [Double] {
        toProbabilities(&scores, sampling)
        var random = Philox(seed: sampling.seed, stream: 2, index: index)
        var speeds = scores
        for v in speeds.indices { speeds[v] /= max(random.exponential(), Double.leastNormalMagnitude) }
        return speeds
    }
}

func argmax(_ values: [Double]) -> Int {
    var best = 0
    for (place, value) in values.enumerated() where value > values[best] { best = place }
    return best
}

/// Turn adjusted logits into the distribution after temperature and filters.
func toProbabilities(_ values: inout [Double], _ sampling: Sampling) {
    let highest = values.max()!
    for v in values.indices { values[v] = exp((values[v] - highest) / sampling.temperature) }
    scale(&values)
    if sampling.topK > 0 && sampling.topK < values.count {
        let least = values.sorted(by: >)[sampling.topK - 1]
        keep(&values, from: least, count: sampling.topK)
    }
    if sampling.topP < 1 {
        let sorted = values.sorted(by: >)
        var (mass, count) = (0.0, 0)
        for value in sorted {
            mass += value
            count += 1
            if mass >= sampling.topP { break }
        }
        keep(&values, from: sorted[count - 1], count: count)
    }
    if sampling.minP > 0 {
        let least = sampling.minP * values.max()!
        for v in values.indices where values[v] < least { values[v] = 0 }
        scale(&values)
    }
}

private func scale(_ values: inout [Double]) {
    let total = pairwiseSum(values[...])
    for v in values.indices { values[v] /= total }
}

/// Keep the `count` largest values, whose smallest is `least`; among equals the first.
private func keep(_ values: inout [Double], from least: Double, count: Int) {
    var equals = count - values.lazy.filter { $0 > least }.count
    for v in values.indices where values[v] <= least {
        if values[v] == least && equals > 0 { equals -= 1 } else { values[v] = 0 }
    }
    scale(&values)
}
