import Foundation
import Testing

@testable import ShardmillDecode

private struct Case: Decodable {
    let seed: String
    let exponent: Int
    let numbers: [String]
    let rows: [Float]
}

@Suite("Expected results") struct ExpectedTests {
    /// As docs/model-json.md describes them.
    @Test func numbersAndRowsAreThoseOfPython() throws {
        for recorded in try vectors("expected", Case.self) {
            let seed = try #require(UInt64(recorded.seed))
            #expect((0..<recorded.numbers.count).map { String(expectedNumber(seed, $0)) } == recorded.numbers)
            #expect(expectedRows(seed, exponent: recorded.exponent, count: 4, channels: 5) == recorded.rows)
        }
    }

    /// The vectors of docs/model-json.md.
    @Test func rowsTakeTheExpertsOfAGroupInTurn() {
        let shares: [Float] = [0.25, 0.125, 0, 0.25, 0, 0.5, 0, 0.75, 0.375, 0.25, 0.125, 0]
        #expect(expectedShares(count: 4, experts: 3, taken: 2) == shares)
    }

    /// The toy's layer changes nothing, so it must give the rows that it is fed with.
    @Test(arguments: [0, 1]) func aPartIsComparedInThreeWays(wrong: Int) throws {
        let build = try ToyBuild { $0["expected"] = ["path": "expected.safetensors"] }
        let rows = expectedRows(3, exponent: 0, count: 7, channels: ToyBuild.vocab)
        try write(rows.enumerated().map { $0 == 40 * wrong ? $1 : $1 * (wrong == 1 ? 1.01 : 1) }, build.folder)
        let backend = ToyBackend()
        let manifest = try Manifest(folder: build.folder)
        let engine = try Engine(manifest, backend: backend)
        var found: [CheckedPart] = []
        try engine.check(try Expected(try #require(manifest.expected)), precision: "fp32") { found.append($0) }
        #expect(found.map(\.name) == ["layers_00_01", "head_0"])
        #expect(found.map(\.isRight) == [wrong == 0, true])
        #expect(found[0].errors.map(\.way) == ["T=1", "T=4", "the last slots"])
        #expect(found[1].limit == nil && found[1].remark == "its rows are not recorded")
        let passes: [[Int]] = (0..<7).map { [$0] } + [[0, 1, 2, 3], [4, 5, 6, 7], [57, 58, 59, 60], [61], [62], [63]]
        #expect(backend.slots == passes)
    }

    private func write(_ rows: [Float], _ folder: URL) throws {
        let about: [String: Any] = [
            "format": 1,
            "parts": [
                "layers_00_01": ["seeds": ["x": [3, 0]], "limits": ["fp32": 1e-4, "fp16": 1e-2]] as [String: Any],
                "head_0": ["why_not": "its rows are not recorded"],
            ] as [String: Any],
        ]
        let text = String(decoding: try JSONSerialization.data(withJSONObject: about), as: UTF8.self)
        let tensor: [String: Any] = [
            "dtype": "F32", "shape": [7, ToyBuild.vocab], "data_offsets": [0, 4 * rows.count],
        ]
        let header = try JSONSerialization.data(
            withJSONObject: ["__metadata__": ["about": text], "layers_00_01/rows": tensor])
        var data = withUnsafeBytes(of: UInt64(header.count).littleEndian) { Data($0) } + header
        for row in rows { withUnsafeBytes(of: row.bitPattern.littleEndian) { data.append(contentsOf: $0) } }
        try data.write(to: folder.appendingPathComponent("expected.safetensors"))
    }
}
