import Foundation
import Testing

@testable import ShardmillDecode

@Test func everyWidthOfEveryFunctionIsRunOnce() throws {
    let build = try ToyBuild()
    let manifest = try Manifest(folder: build.folder)
    let backend = ToyBackend()
    for part in manifest.parts { try backend.specialise(part, widths: manifest.widths) }
    #expect(backend.functions == ["", ""])  // one load for all widths
    #expect(backend.runs == [1, 4, 1, 4])
}

@Test func everyFunctionOfEveryLengthIsLoaded() throws {
    let build = try ToyBuild { manifest in
        manifest["contexts"] = [32]
        var parts = manifest["parts"] as! [[String: Any]]
        parts[0]["functions"] = ["1": "decode", "4": "prefill"]
        let inputs: [String: Any] = ["attn_mask": [1, 1, "T", 32], "kv_write_mask": [1, 1, 32, "T"]]
        let functions = ["1": "decode_32", "4": "prefill_32"]
        parts[0]["contexts"] = ["32": ["functions": functions, "inputs": inputs, "states": ["k_0": [1, 1, 32, 4]]]]
        manifest["parts"] = parts
    }
    let manifest = try Manifest(folder: build.folder)
    let backend = ToyBackend()
    try backend.specialise(manifest.parts[0], widths: manifest.widths)
    #expect(backend.functions == ["decode_32", "prefill_32", "decode", "prefill"])
    #expect(backend.runs == [1, 4, 1, 4])
}

@Test func specialisingStopsWhenAsked() throws {
    let build = try ToyBuild()
    let manifest = try Manifest(folder: build.folder)
    let backend = ToyBackend()
    #expect(throws: CancellationError.self) {
        try backend.specialise(manifest.parts[0], widths: manifest.widths) { throw CancellationError() }
    }
    #expect(backend.functions.isEmpty)
}

@Test func halvesAreThoseOfFloat16() {
    for bits in UInt16.min...UInt16.max {
        let expected = Float(Float16(bitPattern: bits))
        let found = Half.computedFloat(bits)
        #expect(found == expected || found.isNaN && expected.isNaN)
        if expected.isNaN { continue }
        #expect(Half.computedBits(expected) == bits)
        for near in [
            expected.nextUp, expected.nextDown, expected + expected.ulp * 4096, expected * 1.00048828125, expected / 3,
        ] {
            #expect(Half.computedBits(near) == Float16(near).bitPattern)
        }
    }
    #expect(Half.float(Half.bits(.nan)).isNaN)
    #expect(Half.float(Half.computedBits(.nan)).isNaN)
}
