/// How many tokens to ask a drafter for, and how many drafted tokens to verify: the numbers with the most expected
/// tokens for the time that they take.
///
/// The time of each width and of a drafted token, and the rate at which drafts are right, by stated confidence and by
/// place, are measured as the text is generated. The choices affect nothing but speed.
struct DraftLength {
    private static let bins = 12
    private static let prior = 2.0  // trials that the stated confidence itself counts for
    private static let memory = 400.0  // trials of a bin after which older ones fade
    private static let smoothing = 0.2  // weight of the newest pass in a width's time
    private static let probe = 32  // passes after which a width that was given up is tried again
    private static let free = 0.05  // part of a one-token pass below which a drafted token counts as free

    private var right: [Double]
    private var tried: [Double]
    private var places: [(right: Double, tried: Double)] = []  // by place in a draft, if all places before were right
    private var seconds: [Int: Double] = [:]
    private var drafting: Double?  // seconds of a drafted token
    private var idle = 0
    private var short = 0  // passes since the drafter was last asked for as many tokens as a pass may take

    init() {
        right = [Double](repeating: 0, count: Self.bins + 1)
        tried = right
    }

    /// Record that a pass of `width` tokens took `time` seconds. The first of each width is a warm-up and is ignored.
    mutating func timed(_ width: Int, _ time: Double) {
        guard let before = seconds[width] else {
            seconds[width] = 0
            return
        }
        seconds[width] = before == 0 ? time : before + Self.smoothing * (time - before)
    }

    /// Record that a draft of `count` tokens took `time` seconds. The first reads the prompt and is ignored.
    mutating func drafted(_ count: Int, _ time: Double) {
        if count == 0 { return }
        let each = time / Double(count)
        guard let before = drafting else {
            drafting = 0
            return
        }
        drafting = before == 0 ? each : before + Self.smoothing * (each - before)
    }

    /// Return the bin of a stated confidence; the lowest if a drafter states NaN.
    private static func bin(_ stated: Double) -> Int {
        stated.isNaN ? 0 : Int(min(1, max(0, stated)) * Double(bins))
    }

    /// Record that the first `accepted` tokens of a draft were right.
    mutating func observe(_ draft: Draft, accepted: Int) {
        for (place, stated) in draft.confidence.prefix(accepted + 1).enumerated() {
            let bin = Self.bin(stated)
            if tried[bin] >= Self.memory { (right[bin], tried[bin]) = (right[bin] / 2, tried[bin] / 2) }
            tried[bin] += 1
            if place < accepted { right[bin] += 1 }
            if place == places.count { places.append((0, 0)) }
            if places[place].tried >= Self.memory {
                places[place] = (places[place].right / 2, places[place].tried / 2)
            }
            places[place].tried += 1
            if place < accepted { places[place].right += 1 }
        }
    }

    /// Return how many tokens to ask the drafter for, at most `most`; fewer than `most` only if drafting takes time.
    ///
    /// - Parameters:
    ///   - most: the most drafts that a pass may take.
    ///   - width: the width of a pass for a number of tokens.
    mutating func limit(_ most: Int, width: (Int) -> Int) -> Int {
        let single = seconds[1] ?? 0
        guard let drafting, most > 0, single > 0, drafting > Self.free * single else { return most }
        var (best, rate, alive, expected) = (0, 1.0, 1.0, 0.0)
        for place in 0..<most {
            let (right, tried) = place < places.count ? places[place] : (0, 0)
            alive *= (right + Self.prior / 2) / (tried + Self.prior)
            expected += alive
            let cost = max(1, (seconds[width(place + 2)] ?? 0) / single) + Double(place + 1) * drafting / single
            if (1 + expected) / cost > rate { (best, rate) = (place + 1, (1 + expected) / cost) }
        }
        short = best == most ? 0 : short + 1
        if short < Self.probe { return best }
        short = 0
        return most
    }

    /// Return how many tokens of a draft to verify.
    ///
    /// - Parameter width: the width of a pass for a number of tokens.
    mutating func choose(_ draft: Draft, width: (Int) -> Int) -> Int {
        let single = seconds[1] ?? 0
        var (best, rate, alive, expected) = (0, 1.0, 1.0, 0.0)
        for (place, stated) in draft.confidence.enumerated() {
            let bin = Self.bin(stated)
            alive *= (right[bin] + Self.prior * stated) / (tried[bin] + Self.prior)
            expected += alive
            let time = seconds[width(place + 2)] ?? 0
            let cost = single > 0 && time > 0 ? max(1, time / single) : 1
            if (1 + expected) / cost > rate { (best, rate) = (place + 1, (1 + expected) / cost) }
        }
        idle = best > 0 || draft.tokens.isEmpty ? 0 : idle + 1
        if idle < Self.probe { return best }
        idle = 0
        return draft.tokens.count
    }
}
