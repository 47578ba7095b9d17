import Foundation

/// A token that filters may keep, and its power exp((logit - highest) / temperature): its probability but for a factor.
struct Candidate: Comparable {
    let token: Int
    let power: Double

    /// The likelier comes first; among equals the lower.
    static func < (a: Candidate, b: Candidate) -> Bool {
        a.power > b.power || (a.power == b.power && a.token < b.token)
    }
}

/// Return whether two numbers may change their order with the rounding of a computation. Equal numbers do not.
func isNear(_ larger: Double, _ smaller: Double) -> Bool { smaller != larger && smaller > larger * (1 - 1e-12) }

/// Return which of the likeliest tokens the filters keep; nil if rounding decides.
///
/// - Parameters:
///   - candidates: sorted; all tokens that top-k, top-p or min-p can keep, and perhaps more.
///   - rest: the sum of the powers of all other tokens, with a relative error of 2e-5.
func filtered(_ candidates: [Candidate], rest: Double, _ sampling: Sampling) -> [Candidate]? {
    var kept = candidates[...]
    /// Keep the first `count`; return whether it is clear which these are.
    func cut(_ count: Int) -> Bool {
        let clear = count == kept.count || !isNear(kept[count - 1].power, kept[count].power)
        kept = kept[..<count]
        return clear
    }
    if sampling.topK > 0 && !cut(min(sampling.topK, kept.count)) { return nil }
    if sampling.topP < 1 {
        let total = kept.reduce(rest) { $0 + $1.power }
        let rounding = max(1e-9, 2e-5 * rest / total)
        var (sum, count) = (0.0, 0)
        while sum < sampling.topP {
            if count == kept.count || abs(sum - sampling.topP) < rounding { return nil }
            sum += kept[count].power / total
            count += 1
        }
        if abs(sum - sampling.topP) < rounding || !cut(count) { return nil }
    }
    if sampling.minP > 0 {
        let least = sampling.minP * kept[0].power
        let count = kept.firstIndex { $0.power < least } ?? kept.count
        if isNear(kept[count - 1].power, least) || (count < kept.count && isNear(least, kept[count].power)) {
            return nil
        }
        kept = kept[..<count]
    }
    return Array(kept)
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
private func reached(
    _ sorted: [Double], _ mass: Double, _ start: Double
) -> (least: Double, count: Int, nearest: Double) {
    var (sum, count, nearest) = (start, 0, abs(start - mass))
    for value in sorted {
        sum += value
        count += 1
        nearest = min(nearest, abs(sum - mass))
        if sum >= mass { break }
    }
    return (count == 0 ? 0 : sorted[count - 1], count, nearest)
}
