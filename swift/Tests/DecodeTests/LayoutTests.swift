import Foundation
import Testing

@testable import ShardmillDecode

private struct Case: Decodable {
    let runtime: Runtime
    let steps: [Step]
}

private struct Runtime: Decodable {
    let context: Int
    let rope: [String: RopeTable]
    let window: Int?
    let window_slots: Int
    let conv_taps: Int
    let recurrent: Recurrence?
}

private struct Step: Decodable {
    let step: String
    let error: String?
    let result: Bool?
    let left: Int?
    let arrays: [String: Recorded]?
    let numbers: [Int]
    let lists: [[Int]]

    private enum Keys: CodingKey { case step, given, error, result, arrays }

    init(from decoder: Decoder) throws {
        let keys = try decoder.container(keyedBy: Keys.self)
        step = try keys.decode(String.self, forKey: .step)
        error = try keys.decodeIfPresent(String.self, forKey: .error)
        result = try? keys.decode(Bool.self, forKey: .result)
        left = try? keys.decode(Int.self, forKey: .result)
        arrays = try keys.decodeIfPresent([String: Recorded].self, forKey: .arrays)
        numbers = (try? keys.decode([Int].self, forKey: .given)) ?? []
        lists = (try? keys.decode([[Int]].self, forKey: .given)) ?? []
    }
}

/// A shape, and the values in row-major order.
private struct Recorded: Decodable {
    let shape: [Int]
    let values: [Float]

    init(from decoder: Decoder) throws {
        var items = try decoder.unkeyedContainer()
        shape = try items.decode([Int].self)
        values = try items.decode([Float].self)
    }
}

@Test("every array of every scripted pass is Python's: masks equal, rotary rows to the last bit of fp16")
func layoutsAreThoseOfPython() throws {
    let cases = try vectors("layouts", Case.self)
    #expect(cases.count == 6)
    var (rows, other) = (0, 0)
    for one in cases {
        var layout = KVLayout(
            slots: one.runtime.context, window: one.runtime.window, windowSlots: one.runtime.window_slots,
            taps: one.runtime.conv_taps, rope: one.runtime.rope, recurrence: one.runtime.recurrent)
        for step in one.steps {
            switch step.step {
            case "forget": layout.forget(step.lists[0])
            case "resize": layout.resize(step.numbers[0])
            case "reset": layout.reset()
            case "rewindable": #expect(layout.rewindable(step.numbers[0]) == step.result)
            case "undoable": #expect(layout.undoable(step.numbers[0]) == step.left)
            default:
                if let error = step.error {
                    let (slots, positions) = (step.lists[0], step.lists[1])
                    #expect(throws: ShardmillError(.request, error)) {
                        try layout.arrays(slots: slots, positions: positions)
                    }
                    continue
                }
                let arrays = try layout.arrays(slots: step.lists[0], positions: step.lists[1])
                #expect(Set(arrays.keys) == Set(step.arrays!.keys))
                for (name, recorded) in step.arrays! {
                    let array = try #require(arrays[name])
                    #expect(array.shape == recorded.shape)
                    if name.hasPrefix("rope") {
                        for (a, b) in zip(array.values, recorded.values) {
                            rows += 1
                            if Float16(a) != Float16(b) { other += 1 }
                            #expect(abs(Int(Float16(a).bitPattern) - Int(Float16(b).bitPattern)) <= 1)
                        }
                    } else {
                        #expect(array.values == recorded.values, "\(name) of \(step.lists)")
                    }
                }
            }
        }
    }
    #expect(rows > 400 && Double(other) <= 0.0001 * Double(rows))
}

@Test("a pass is filled up by its last token, or by zeros, and caches keep what fits")
func padding() {
    let array = HostArray(shape: [1, 2, 2, 1], values: [1, 2, 3, 4])
    #expect(array.padded(axis: 2, to: 3, withZeros: false).values == [1, 2, 2, 3, 4, 4])
    #expect(array.padded(axis: 2, to: 3, withZeros: true).values == [1, 2, 0, 3, 4, 0])
    #expect(array.padded(axis: 2, to: 3, withZeros: true).firstTokens(2) == array)
    var longer = HostArray(zeros: [1, 2, 3, 1])
    longer.carry(from: array)
    #expect(longer.values == [1, 2, 0, 3, 4, 0])
    var shorter = HostArray(zeros: [1, 2, 1, 1])
    shorter.carry(from: array)
    #expect(shorter.values == [1, 3])
}
