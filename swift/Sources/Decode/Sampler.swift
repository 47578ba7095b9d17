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
    /// Subtracted from the logit of each token that has been generated.
    public var presencePenalty = 0.0
    /// Subtracted from the logit of a token as often as it has been generated.
    public var frequencyPenalty = 0.0
    /// The same seed gives the same tokens, with drafts or without.
    public var seed: UInt64 = 0
    /// Token -> value added to its logit.
    public var logitBias: [Int: Double] = [:]

    /// Sample greedily.
    public init() {}

    /// Throw if a value is out of its range.
    package func check(vocab: Int) throws {
        let checks = [
            (temperature >= 0 && temperature.isFinite, "temperature must be at least 0 and finite"),
            (topK >= 0, "topK must be at least 0"),
            (topP > 0 && topP <= 1, "topP must be in (0, 1]"),
            (minP >= 0 && minP <= 1, "minP must be in [0, 1]"),
            ((0.001...1000).contains(repetitionPenalty), "repetitionPenalty must be in [0.001, 1000]"),
            (abs(presencePenalty) <= 1000, "presencePenalty must be in [-1000, 1000]"),
            (abs(frequencyPenalty) <= 1000, "frequencyPenalty must be in [-1000, 1000]"),
            (
                logitBias.allSatisfy { (0..<vocab).contains($0.key) && $0.value.isFinite },
                "logitBias names a token that the vocabulary lacks"
            ),
        ]
        for (good, reason) in checks where !good { throw ShardmillError(.request, reason) }
    }
}

/// The state of a request's sampling: the tokens in the text, and the number chosen.
///
/// The filters and their order are those of shardmill's Python runtime, and so are the random numbers: each token is
/// drawn by a race of exponential variables, from numpy's Philox generator keyed by the seed with the token's index as
/// counter. A filter mostly keeps few tokens: then probabilities and random numbers are computed for these alone.
package struct Sampler {
    /// A token whose logit is not the model's.
    private struct Changed {
        let token: Int
        var bias = 0.0
        var isSeen = false
        /// How often the token has been generated.
        var generated = 0
        var score = 0.0
    }

    /// The token with the largest number, of equals the first, and the two largest numbers.
    private struct Outcome {
        var token = 0
        var first = -Double.infinity
        var second = -Double.infinity

        @inline(__always)
        mutating func see(_ token: Int, _ number: Double) {
            if number > first || (number == first && token < self.token) {
                (self.token, first, second) = (token, number, first)
            } else if number > second {
                second = number
            }
        }
    }

    private let sampling: Sampling
    private let vocab: Int
    private var index: UInt64 = 0
    private var changed: [Changed] = []
    /// The place of each token in `changed`, or -1; empty if no logit is ever changed.
    private var places: [Int32] = []
    private var row: Row?
    private var kept: [Candidate] = []
    private var scores: [Double] = []

    package init(_ sampling: Sampling, prompt: [Int], vocab: Int) {
        self.sampling = sampling
        self.vocab = vocab
        if sampling.logitBias.isEmpty && sampling.repetitionPenalty == 1 && !counts { return }
        places = [Int32](repeating: -1, count: vocab)
        for (token, bias) in sampling.logitBias { changed[place(token)].bias = bias }
        if sampling.repetitionPenalty != 1 { for token in prompt { changed[place(token)].isSeen = true } }
    }

    /// Whether generated tokens are counted.
    private var counts: Bool { sampling.presencePenalty != 0 || sampling.frequencyPenalty != 0 }

    /// Return a token's place in `changed`, where it is added if it is new.
    private mutating func place(_ token: Int) -> Int {
        if places[token] < 0 {
            places[token] = Int32(changed.count)
            changed.append(Changed(token: token))
        }
        return Int(places[token])
    }

    /// Record a generated token.
    private mutating func see(_ token: Int) {
        if sampling.repetitionPenalty != 1 { changed[place(token)].isSeen = true }
        if counts { changed[place(token)].generated += 1 }
    }

    /// Choose the next token from the logits after token t.
    package mutating func next(_ logits: Logits, _ t: Int) throws -> Int {
        let token: Int
        if sampling.temperature == 0 && places.isEmpty {
            token = try logits.argmax(t)
        } else {
            try read(logits, t)
            token = sampling.temperature == 0 ? two().token : race().token
        }
        see(token)
        index += 1
        return token
    }

    /// Choose the next token after a proposal that was not drawn at random: it does not influence the choice.
    mutating func check(_ logits: Logits, _ t: Int, drafted: Int) throws -> Int { try next(logits, t) }

    /// Return the least change of a logit that could change the next token.
    mutating func margin(_ logits: Logits, _ t: Int) throws -> Double {
        try read(logits, t)
        if sampling.temperature == 0 {
            let found = two()
            return found.first - found.second
        }
        let found = race()
        return log(found.first) * sampling.temperature - log(max(0, found.second)) * sampling.temperature
    }

    /// Fill `row` with the logits after token t, with bias and penalties.
    private mutating func read(_ logits: Logits, _ t: Int) throws {
        var row = self.row ?? Row(vocab)
        self.row = nil  // so that it is not copied
        defer { self.row = row }
        try row.fill(logits, t)
        let penalty = sampling.repetitionPenalty
        for place in changed.indices {
            var score = Double(row[changed[place].token]) + changed[place].bias
            if changed[place].isSeen { score = score > 0 ? score / penalty : score * penalty }
            if changed[place].generated > 0 {
                score -= sampling.presencePenalty + Double(changed[place].generated) * sampling.frequencyPenalty
            }
            changed[place].score = score
            row[changed[place].token] = Float(score)
        }
        row.summarise()
    }

    /// Return a logit with bias and penalties. `row` has it rounded to fp32.
    private func score(_ row: Row, _ token: Int) -> Double {
        let place = places.isEmpty ? -1 : Int(places[token])
        return place < 0 ? Double(row[token]) : changed[place].score
    }

    /// Return the likeliest token, its logit and the logit of the second.
    private func two() -> Outcome {
        guard let row else { return Outcome() }
        var found = Outcome()
        for v in row.bound(2).flatMap({ row.tokens(from: $0, most: vocab) }) ?? Array(0..<vocab) {
            found.see(v, score(row, v))
        }
        return found
    }

    /// Return the token that is drawn, its speed and that of the second.
    ///
    /// A token's speed is its probability by an exponential variable, which the token's own number of the stream gives.
    private mutating func race() -> Outcome {
        let isFiltered = sampling.topK > 0 || sampling.topP < 1 || sampling.minP > 0
        return (isFiltered ? raceOfFew() : raceOfUnfiltered()) ?? raceOfAll()
    }

    /// Race the tokens that the filters keep.
    ///
    /// - Returns: nil if too many tokens are kept, or if rounding decides: then the computation must be numpy's.
    private func raceOfFew() -> Outcome? {
        guard let row, let kept = few(row) else { return nil }
        let random = Philox(seed: sampling.seed, stream: 2, index: index)
        var found = Outcome()
        for one in kept { found.see(one.token, one.power / wait(random.number(one.token))) }
        return isNear(found.first, found.second) ? nil : found
    }

    /// Return the tokens that the filters keep; see `raceOfFew`.
    private func few(_ row: Row) -> [Candidate]? {
        guard let best = best(row) else { return nil }
        let temperature = sampling.temperature
        func least(_ exponent: Double) -> Float { Float(best + temperature * exponent) }
        var threshold = -Float.infinity
        var rest = 0.0
        if 0 < sampling.topK && sampling.topK < vocab {
            guard let bound = row.bound(sampling.topK) else { return nil }
            threshold = bound
        } else if sampling.topP < 1 {
            for level in [least(-7), least(-12)] where threshold == -.infinity {
                let (total, below) = row.powers(temperature, below: level)
                if below < 0.999 * (1 - sampling.topP) * total { (threshold, rest) = (level, below) }
            }
            if threshold == -.infinity { return nil }  // too much of the mass lies below
        } else if sampling.minP > 0 {
            threshold = least(log(sampling.minP) - 1e-3)
        } else {
            return nil
        }
        guard let tokens = row.tokens(from: threshold, most: 4096) else { return nil }
        let candidates = tokens.map { Candidate(token: $0, power: exp((score(row, $0) - best) / temperature)) }
        return filtered(candidates.sorted(by: <), rest: rest, sampling)
    }

    /// Race all tokens; nil if rounding decides.
    ///
    /// A wait is at least as long as its number. So four tokens that are not likely are mostly slower than the second so
    /// far, and neither their powers nor their waits are computed.
    private func raceOfUnfiltered() -> Outcome? {
        guard let row, let best = best(row) else { return nil }
        let (likely, most) = (Float(best - 7 * sampling.temperature), exp(-6.9))  // of the powers of other tokens
        let random = Philox(seed: sampling.seed, stream: 2, index: index)
        var found = Outcome()
        for first in stride(from: 0, to: vocab, by: 4) {
            let block = random.block(first >> 2)
            let shortest = Philox.number(min(min(block[0], block[1]), min(block[2], block[3])))
            if most < found.second * shortest && row.highest(from: first) < likely { continue }
            for v in first..<min(first + 4, vocab) {
                let power = exp((score(row, v) - best) / sampling.temperature)
                found.see(v, power / wait(Philox.number(block[v & 3])))
            }
        }
        return isNear(found.first, found.second) ? nil : found
    }

    /// Return the largest logit.
    private func best(_ row: Row) -> Double? {
        row.tokens(from: row.highest, most: 4096)?.map { score(row, $0) }.max()
    }

    /// Run the race as numpy does, with a probability for every token.
    private mutating func raceOfAll() -> Outcome {
        guard let row else { return Outcome() }
        if scores.isEmpty { scores = [Double](repeating: 0, count: vocab) }
        for v in 0..<vocab { scores[v] = Double(row[v]) }
        for one in changed { scores[one.token] = one.score }
        toProbabilities(&scores, sampling)
        let random = Philox(seed: sampling.seed, stream: 2, index: index)
        var found = Outcome()
        for first in stride(from: 0, to: vocab, by: 4) {
            let block = random.block(first >> 2)
            for v in first..<min(first + 4, vocab) where scores[v] > 0 {
                let number = Philox.number(block[v & 3])
                if scores[v] < found.second * number { continue }  // slower: a wait is at least as long as its number
                found.see(v, scores[v] / wait(number))
            }
        }
        return found
    }
}
